"""Which ground truths a right answer can match, and how many at once."""

from __future__ import annotations

from contextlib import AbstractContextManager

import psutil
import pytest

from ctpo_megatron.config import Extension, RewardConfig
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.rewards import (
    RewardWorkersLost,
    as_products,
    ground_truth_problem,
    in_words,
    score_math,
    unverifiable,
    validation,
)
from ctpo_megatron.rewards.fork_server import fork_server
from tests.support.deadlines import scaled
from tests.support.kills import signalled_as_they_start, with_word

READABLE = (
    *("72", "-3.5", "+5", "050", "1,000", "1{,}000", "\\$72", "$72$", "50\\%", "72 %", "5%", "0.5", "10^{99}", "9!"),
    *("\\frac{3}{4}", "-\\frac{2}{3}", "2\\sqrt{7}", "2\\pi", "\\log 5", "\\infty", "90^\\circ", "12:30", "3:2"),
    *("(1,2)", "[0,1)", "\\{1,2,3\\}", "3 and 5", "4\\text{ and }5", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    *("x^2+3x-5", "x=12", "x\\le 3", "5x", "p - q", "f(x)=2x", "6+9i"),
    *("\\text{(A)}", "A", "(A)", "\\text{Evelyn}", "Evelyn", "\\text{even}", "no solution"),
    *("\\{x \\mid x\\ge 0\\}", "\\frac{1\\pm\\sqrt{5}}{2}", "100+5\\%", "\\text{June 20}", "x^2+x^2", "2\\cdot 2"),
    *("10\\text{ cm}", "10 \\mathrm{~cm}", "18 \\text{ inches}", "2 hours"),
)
IN_OTHER_WORDS = {
    "72 clips": "72",
    "72.": "72",
    "7 p.m.": "7",
    "A) 5": "5",
    "answer: 5": "5",
    "The answer is 72": "72",
    "sqrt(7)": "\\sqrt{7}",
}
"""Ground truth -> an answer that counts."""
UNREADABLE = {
    "#### 72": "keep what follows `####`, here '72'",
    "48/2 = <<48/2=24>>24 more.\n#### 72": "keep what follows `####`, here '72'",
    "<answer>5</answer>": "\\boxed{5} scores 0",
    "see the textbook, page 5 %%$$": "\\boxed{5} scores 0",
    "all real numbers greater than x": "a sentence",
    "}{": "is no answer",
    "?": "is no answer",
    "unknown": "is no answer",
    "\\text{Unknown.}": "is no answer",
    "N/A": "is no answer",
    "n.a.": "is no answer",
    "NA": "is no answer",
    "Not given": "is no answer",
    "Don\u2019t know": "is no answer",
    "5 \\mid n": "cannot be read",
    "1/\\sqrt{3} \\approx 58": "is not read to its end",
    "room 12": "\\boxed{12} scores 0",
    "nan": "is no answer",
    "None": "is no answer",
    "1/0": "cannot be compared with itself: ValueError",
    "\\frac{1}{2": "scores 0 against itself",
}


@pytest.mark.parametrize("answer", READABLE)
def test_readable(answer: str) -> None:
    assert ground_truth_problem(answer) == ""


@pytest.mark.parametrize("answer", IN_OTHER_WORDS)
def test_the_answer_alone_counts(answer: str) -> None:
    assert ground_truth_problem(answer) == ""
    assert score_math(f"\\boxed{{{IN_OTHER_WORDS[answer]}}}", answer) == 1


@pytest.mark.parametrize("answer", UNREADABLE)
def test_unreadable(answer: str) -> None:
    assert UNREADABLE[answer] in ground_truth_problem(answer)


def prompt(answer: str, source: str = "ours") -> Prompt:
    return Prompt(answer, source, (), answer, ())


def test_prompts_of_users_functions_are_their_own_affair() -> None:
    config = RewardConfig(by_source={"theirs": Extension(name="a.b:C")})
    answers = ["72", "\\frac{1}{2}", "#### 72"]
    found = unverifiable([prompt(a, source) for source in ("theirs", "ours") for a in answers], config)
    assert list(found) == [5] and "####" in found[5]
    assert unverifiable([prompt("#### 72")], RewardConfig(function=Extension(name="a.b:C"))) == {}
    assert unverifiable([prompt("72"), prompt("-0.5")], RewardConfig()) == {}


def test_a_ground_truth_that_takes_too_long_is_listed() -> None:
    seconds = ["+".join(f"\\frac{{{x}^{{{n}}}}}{{\\sqrt{{{n}+y}}}}" for n in range(2, 600)) for x in "xz"]
    found = unverifiable([prompt(answer) for answer in seconds], RewardConfig(timeout_s=0.1))
    assert set(found) == {0, 1}
    assert "takes longer than reward.timeout_s (0.1 s)" in found[0]


def killed_while_they_check(count: int) -> AbstractContextManager[None]:
    """So many new workers of the fork server."""
    fork_server(math=True)
    (server,) = with_word(psutil.Process().children(), "forkserver")
    return signalled_as_they_start(server.children, count)


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_PATIENCE_S", scaled(3))


FORMULAS = [prompt(f"x^{power}+\\sqrt{{3}}") for power in range(2, 12)]


@pytest.mark.usefixtures("little_patience")
@pytest.mark.parametrize("count", [1, 2])
def test_a_process_that_something_else_kills_makes_no_ground_truth_wrong(count: int) -> None:
    with killed_while_they_check(count):
        assert unverifiable(FORMULAS, RewardConfig()) == {}


@pytest.mark.usefixtures("little_patience")
def test_processes_that_are_killed_again_and_again_are_not_the_datas_fault() -> None:
    with killed_while_they_check(10_000), pytest.raises(RewardWorkersLost, match="is something killing them"):
        unverifiable(FORMULAS, RewardConfig())


def test_ground_truths_that_are_words_are_counted() -> None:
    prompts = [prompt(answer) for answer in ("Evelyn", "\\text{evelyn}", "Yes", "72", "x^2", "1/2")]
    prompts.append(prompt("unclear", "theirs"))
    config = RewardConfig(by_source={"theirs": Extension(name="a.b:C")})
    assert in_words(prompts, config) == {"evelyn": 2, "yes": 1}


def test_letters_of_one_family_are_products_and_counted() -> None:
    prompts = [prompt(answer) for answer in ("abc", "bad", "bad", "DNA", "ab", "xyz", "72", "\\text{abc}")]
    assert as_products(prompts, RewardConfig()) == {"bad": 2, "abc": 1, "xyz": 1}


@pytest.mark.parametrize("answer", ["24pgs", "2mgh", "7prt"])
def test_a_number_and_letters_that_are_no_unit_are_refused(answer: str) -> None:
    assert "words or signs around a number" in ground_truth_problem(answer)


def test_a_ground_truth_that_takes_too_much_processor_time_is_refused() -> None:
    seconds = "+".join(f"\\frac{{x^{{{n}}}}}{{\\sqrt{{{n}+y}}}}" for n in range(2, 600))
    assert "takes more than 1 s of processor time" in ground_truth_problem(seconds)
    assert "UncomputableError: a power of more than a million bits" in ground_truth_problem("9^{9^{9}}")
