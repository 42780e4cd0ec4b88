"""Which box counts, and the verdict on it."""

from __future__ import annotations

import pytest

from ctpo_answers import answer_part, last_boxed, score_math


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"The answer is \boxed{42}.", "42"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{7} and then \boxed{8", "7"),
        (r"\boxed{", None),
        (r"\boxed{1 {2}", None),
        (r"\boxed{}", ""),
        (r"boxed{5}", None),
        (r"\boxed 5", None),
        ("42", None),
        ("", None),
        ("\\boxed{ends with a backslash\\", None),
    ],
)
def test_last_boxed(text, box):
    assert last_boxed(text) == box


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"\boxed{42}", "42", 1.0),
        (r"\boxed{042}", "42", 1.0),
        (r"\boxed{1{,}234}", "1234", 1.0),
        (r"\boxed{\frac12}", "0.5", 1.0),
        (r"\boxed{x=3}", "3", 1.0),
        (r"\boxed{-5}", "5", 0.0),
        (r"\boxed{42} no, \boxed{43}", "42", 0.0),
        ("The answer is 42.", "42", 0.0),
        (r"\boxed{}", "42", 0.0),
        (r"\boxed{)(}", "42", 0.0),
    ],
)
def test_score_math(text, answer, reward):
    assert score_math(text, answer) == reward


def test_thousands_of_digits_are_a_number() -> None:
    digits = "".join(str(place % 10) for place in range(1, 6001))
    assert score_math(rf"\boxed{{{digits}}}", digits) == 1
    assert score_math(rf"\boxed{{{digits[:-1]}1}}", digits) == 0
    assert score_math(r"\boxed{\frac{10^{5000}}{10}}", "1" + "0" * 4999) == 1


def test_an_unreadable_ground_truth_is_an_error():
    with pytest.raises(ValueError, match="cannot read the ground truth"):
        score_math(r"\boxed{1}", "")


@pytest.mark.parametrize(
    ("text", "in_thinking", "outside"),
    [
        (r"\boxed{5}", 1, 1),
        (r"<think>\boxed{4}</think>\boxed{5}", 1, 1),
        (r"<think>\boxed{5}</think>I do not know.", 1, 0),
        (r"<think>\boxed{5}</think>It is \boxed{4}.", 0, 0),
        (r"<think>first guess \boxed{5}, let me check", 0, 0),
        (r"\boxed{5}<think>is that so?", 0, 0),
        (r"<think>a</think>\boxed{5}<think>b", 0, 0),
        (r"<think>\boxed{5}</think><think>b", 0, 0),
        (r"\boxed{5}</think>", 1, 0),
    ],
)
def test_thinking_that_never_ended_earns_nothing(text: str, in_thinking: float, outside: float) -> None:
    assert score_math(text, "5") == in_thinking
    assert score_math(answer_part(text, box_in_thinking=False), "5") == outside
