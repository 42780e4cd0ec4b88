"""The lenient scorer beside the strict one, and the form in which answers are compared."""

from __future__ import annotations

import pytest

from ctpo_answers import canonical, reference_answer, score_math, score_reference, votes


@pytest.mark.parametrize(
    ("forms", "one"),
    [
        (["0.5", ".5", "1/2", "\\dfrac12", "\\tfrac{1}{2}", "x = \\frac{1}{2}", "$\\frac{2}{4}$", "0.50."], "1/2"),
        (["1000", "1{,}000", "1,000", "1000.0", "1\\,000", "1,000 \\text{ cm}", "+1000"], "1000"),
        (["070", "70", "70\\%", "\\$70", "70^\\circ", "m = 70", "\\boxed{70}"], "70"),
        (["-\\frac{3}{6}", "-1/2", "-0.5"], "-1/2"),
        (["2\\sqrt2", "2 \\sqrt{2}", "2\\,\\sqrt{2}"], "2\\sqrt{2}"),
        (["(1, 2)", "\\left(1,2\\right)", "(1,\\!2)"], "(1,2)"),
        (["\\text{(B)}", "(B)"], "(B)"),
    ],
)
def test_forms_of_one_answer_are_one_in_a_vote(forms: list[str], one: str) -> None:
    for form in forms:  # each beside a plain form: several units or names would be several answers
        assert len(set(votes([one, form]))) == 1
    assert one in {canonical(form) for form in forms}


DIFFERENT = [
    *(("1/2", "1/3"), ("(1,234)", "1234"), ("1,2,3", "123"), ("3", "-3")),
    *(("0.\\overline{3}", "0.3"), ("x=3", "y=3"), ("1 2", "12"), ("1 1/2", "11/2"), ("\\overline{z}", "z")),
    *(("5 \\text{ cm}", "5 \\text{ m}"), ("5 \\text{ cm}", "5 \\text{ cm}^2"), ("50_8", "50_9"), ("50_8", "50")),
    *(("50:1", "50"), ("A", "a"), ("A", "B"), ("0.0000001", "0.0000002"), ("2x+3t", "2x+3"), ("50!", "50")),
    *(("0.333333", "1/3"), ("10^{22}", "10^{21}"), ("1, 2", "1 2"), ("[0,1]", "(0,1)"), ("1+2i", "1-2i")),
]


@pytest.mark.parametrize(("a", "b"), [*DIFFERENT, ("1/0", "2/0"), ("2\\sqrt{2}", "\\sqrt{8}")])
def test_different_answers_stay_different(a: str, b: str) -> None:
    assert canonical(a) != canonical(b)
    assert len(set(votes([a, b]))) == 2


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_the_reference_takes_no_different_answers_for_equal(a: str, b: str) -> None:
    assert score_reference(f"\\boxed{{{a}}}", b) == 0


def test_an_answer_without_a_name_votes_with_the_only_named_one() -> None:
    assert len(set(votes(["3", "x=3", "x = 3.0", "3."]))) == 1
    assert len(set(votes(["3", "x=3", "y=3"]))) == 3
    assert len(set(votes(["5", "5 \\text{ cm}", "7"]))) == 2


@pytest.mark.parametrize("text", ["", "9" * 5000, "\\text{a" * 300 + "}" * 300, "\\frac" * 500, "{" * 900])
def test_any_text_has_a_form(text: str) -> None:
    assert isinstance(canonical(text), str)


@pytest.mark.parametrize(
    ("text", "answer", "strict", "lenient"),
    [
        ("So \\boxed{72}.", "72", 1, 1),
        ("So the result is 72.", "72", 0, 1),  # no box
        ("[tool] 72\nI do not know.", "72", 0, 1),  # a number that a tool printed
        ("Answer: 1/2", "\\frac{1}{2}", 0, 1),
        ("\\boxed{71} would be wrong, Answer: x = 72", "72", 0, 1),
        ("\\boxed{71}", "72", 0, 0),
        ("nothing", "72", 0, 0),
        ("Answer: 72" + 400 * " and so on\n" + "\\boxed{3}", "72", 0, 0),  # too far from the end
    ],
)
def test_the_reference_is_more_lenient(text: str, answer: str, strict: float, lenient: float) -> None:
    assert (score_math(text, answer), score_reference(text, answer)) == (strict, lenient)


def test_a_truth_that_cannot_be_read_is_an_error_as_in_the_strict_scorer() -> None:
    with pytest.raises(ValueError, match="cannot read the ground truth"):
        score_reference("\\boxed{1}", "\\text{}")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("it is \\boxed{\\frac12}, 5", "\\frac12"),
        ("Answer: n = 5\n", " 5"),
        ("first 7, then 1,024.", "1,024"),
        ("no", None),
    ],
)
def test_the_answer_that_the_reference_reads(text: str, answer: str | None) -> None:
    assert reference_answer(text) == answer
