"""Which box counts, and the verdict on it."""

from __future__ import annotations

import pytest

from ctpo_megatron.rewards import last_boxed, score_math


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


def test_an_unreadable_ground_truth_is_an_error():
    with pytest.raises(ValueError, match="cannot read the ground truth"):
        score_math(r"\boxed{1}", "")
