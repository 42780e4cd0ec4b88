"""Which prompts have ground truths that no right answer can match, in processes that can be killed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import yaml

from ctpo_megatron.config import Extension, RewardConfig
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.rewards import RewardWorkersLost, as_products, in_words, unverifiable, validation
from tests.support.deadlines import scaled
from tests.support.kills import signalled_as_they_start, with_word


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
    unverifiable(FORMULAS[:1], RewardConfig())  # starts it
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


def test_the_answers_of_the_examples_families_are_among_the_usual_ones() -> None:
    root = Path(__file__).parents[2]
    families, usual = (
        yaml.safe_load((root / name).read_text(encoding="utf-8"))
        for name in ("examples/smollm2/families.yaml", "answers/tests/no_false_alarms.yaml")
    )
    assert families and set(families) <= set(usual)
