"""Usual ground truths are admitted, right for themselves, and not equal to a wrong neighbour."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from test_ground_truth_table import reading

from ctpo_answers import ground_truth_problem, score_math

USUAL: dict[str, list[object]] = yaml.safe_load(
    Path(__file__).with_name("no_false_alarms.yaml").read_text(encoding="utf-8")
)
REFUSED = {
    "0,25": "decimal comma",
    "12,34,567": "several numbers",
    "#### 72": "####",
    "unknown": "no answer",
    "all real numbers greater than x": "a sentence",
}
"""Ground truths of the same sources that no answer can match for certain, and a word of the reason."""
FAMILIES = [source for source in USUAL if re.fullmatch("[a-z_]+", source)]
"""Of reasoning-gym."""
ONE_FAMILY = ("abcd", "mnk", "pqrs", "uvw", "xyz")
"""Letters of variables that are a product together."""


def neighbour(text: str) -> str:
    """Another answer than a number, a letter or a word alone."""
    if re.fullmatch(r"-?(\d+(\.\d+)?|0x[\da-f]+)", text):
        return text[:-1] + ("2" if text[-1] == "1" else "1")
    if re.fullmatch(r"[A-D]", text):
        return chr(ord(text) + 1)
    assert text.isalpha() and text != text[::-1], f"{text}: write the pair [ground truth, wrong answer]"
    return text[::-1]


def usual() -> Iterator[tuple[str, object, str]]:
    """(source, ground truth, wrong answer)."""
    for source, entries in USUAL.items():
        for entry in entries:
            gold, wrong = entry if isinstance(entry, list) else (entry, None)
            yield source, gold, wrong or neighbour(reading({"gold": gold})[0])


def scored(answer: str, gold: str) -> float:
    return float(score_math(f"The answer is \\boxed{{{answer}}}.", gold))


@pytest.mark.parametrize(("source", "gold", "wrong"), usual())
def test_a_usual_ground_truth_is_scored(source: str, gold: object, wrong: str) -> None:
    text, reason = reading({"gold": gold})
    assert (reason, scored(text, text), scored(wrong, text)) == ("", 1, 0), (source, text, wrong)


@pytest.mark.parametrize("gold", REFUSED)
def test_refusals_that_are_true(gold: str) -> None:
    assert REFUSED[gold] in ground_truth_problem(gold)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_reasoning_gym(family: str) -> None:
    """As the installed package makes it. The lock has none; the table above holds stored answers."""
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is in requirements/examples.txt")
    for problem in reasoning_gym.create_dataset(family, size=100, seed=7):
        text = problem["answer"]
        assert ground_truth_problem(text) == "", text
        assert scored(text, text) == 1, text
        same_backward = text.isalpha() and (
            text == text[::-1] or any(set(text) <= set(letters) for letters in ONE_FAMILY)
        )
        if not same_backward:
            assert scored(neighbour(text), text) == 0, text
