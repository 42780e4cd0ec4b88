"""Which ground truths a right answer can match."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from ctpo_answers import ProcessorTimeError, cpu_limit, ground_truth_problem, score_math

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


@pytest.mark.parametrize("answer", ["24pgs", "2mgh", "7prt"])
def test_a_number_and_letters_that_are_no_unit_are_refused(answer: str) -> None:
    assert "words or signs around a number" in ground_truth_problem(answer)


def test_a_limit_that_a_library_swallows_comes_again() -> None:
    end = time.process_time() + 20
    with pytest.raises(ProcessorTimeError), cpu_limit(0.05):
        for _ in range(2):
            with suppress(BaseException):
                while time.process_time() < end:
                    pass
        while time.process_time() < end:
            pass
    assert time.process_time() < end


def test_a_ground_truth_that_takes_too_much_processor_time_is_refused() -> None:
    seconds = "+".join(f"\\frac{{x^{{{n}}}}}{{\\sqrt{{{n}+y}}}}" for n in range(2, 600))
    assert "takes more than 1 s of processor time" in ground_truth_problem(seconds)
    assert "UncomputableError: a power of more than a million bits" in ground_truth_problem("9^{9^{9}}")
