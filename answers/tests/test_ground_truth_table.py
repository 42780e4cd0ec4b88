"""The tables of ground truths: right answers earn 1, wrong ones 0; what cannot be scored is refused with its reason.

`python answers/tests/test_ground_truth_table.py` prints the rates of every class, and what is judged wrongly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from child_judge import Judge, scaled

from ctpo_answers import ground_truth_problem, score_math, score_reference

FILES = {
    file.stem: yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
    for file in sorted(Path(__file__).parent.glob("ground_truths*.yaml"))
}
TABLE: dict[str, list[dict[str, Any]]] = {name: rows for classes in FILES.values() for name, rows in classes.items()}
RIGHT = 0.98
"""Least share of right answers that must earn 1; of wrong ones all must earn 0."""
CPU_S = {"uncomputable": 1.0}
"""Class -> CPU time for a verdict; 20 for the others."""
MONSTERS = {
    "braces": "{" * 10_000 + "1" + "}" * 10_000,
    "brackets": "(" * 10_000 + "1" + ")" * 10_000,
    "roots": "\\sqrt{" * 10_000 + "1" + "}" * 10_000,
    "fractions": "\\frac{1}{" * 10_000 + "1" + "}" * 10_000,
    "powers": "2^{" * 10_000 + "1" + "}" * 10_000,
    "texts": "\\text{" * 10_000 + "a" + "}" * 10_000,
    "open braces": "{" * 10_000,
    "minus signs": "-" * 100_000 + "1",
    "digits": "9" * 100_000,
    "decimals": "0." + "3" * 100_000,
    "sum": "1+" * 50_000 + "1",
    "list": "1," * 50_000 + "1",
    "letters": "x" * 100_000,
    "words": "\\text{" + "no " * 33_000 + "}",
    "factorials": "3" + "!" * 10_000,
}
"""Answers that are long or deep."""


def reading(row: dict[str, Any]) -> tuple[str, str]:
    """The ground truth as a text, and why it is refused. Numbers are written in digits."""
    gold = row["gold"]
    text = gold.strip() if isinstance(gold, str) else f"{Decimal(repr(gold)):f}".removesuffix(".0")
    return text, ground_truth_problem(text)


@cache
def judge() -> Judge:
    return Judge()


def verdicts(row: dict[str, Any], score: Any, cpu_s: float) -> Iterator[tuple[str, str, bool]]:
    """(kind, answer, judged as it should be) of every answer of a row."""
    gold, _ = reading(row)
    for kind, reward in (("right", 1.0), ("wrong", 0.0)):
        for answer in row[kind]:
            yield kind, answer, judge().score(score, answer, gold, cpu_s) == reward


def scored_rows(name: str) -> list[dict[str, Any]]:
    return [row for row in TABLE[name] if "refused" not in row]


@cache
def errors(name: str, score: Any) -> dict[str, list[str]]:
    """kind -> the answers that are judged wrongly."""
    found: dict[str, list[str]] = {"right": [], "wrong": []}
    for row in scored_rows(name):
        for kind, answer, ok in verdicts(row, score, scaled(CPU_S.get(name, 20))):
            if not ok:
                found[kind].append(f"{row['gold']!r}: {answer!r}")
    return found


def test_no_class_stands_in_two_files() -> None:
    assert len(TABLE) == sum(map(len, FILES.values()))


@pytest.mark.parametrize("name", TABLE)
def test_the_table_is_wide_enough(name: str) -> None:
    rows = scored_rows(name)
    assert len(rows) >= 12
    assert len({row["style"] for row in rows}) >= 3
    assert all(len(row["right"]) >= 2 and len(row["wrong"]) >= 3 for row in rows)


@pytest.mark.parametrize("name", TABLE)
def test_right_answers_earn_one(name: str) -> None:
    total = sum(len(row["right"]) for row in scored_rows(name))
    wrongly = errors(name, score_math)["right"]
    assert 1 - len(wrongly) / total >= RIGHT, wrongly


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("score", [score_math, pytest.param(score_reference, marks=pytest.mark.slow)])
def test_wrong_answers_earn_nothing(name: str, score: Any) -> None:
    assert errors(name, score)["wrong"] == []


@pytest.mark.parametrize("answer", MONSTERS)
@pytest.mark.parametrize(
    "gold", ["7", "\\frac{1}{2}", "x^2+2", "1, 2", "10 \\text{ cm}", "\\text{Evelyn}", "50\\%", "0x5ae8"]
)
def test_a_long_or_deep_answer_earns_nothing_within_a_second(gold: str, answer: str) -> None:
    assert judge().score(score_math, MONSTERS[answer], gold, scaled(1)) == 0


@pytest.mark.parametrize("name", TABLE)
def test_only_what_is_no_answer_is_refused(name: str) -> None:
    for row in TABLE[name]:
        reason = reading(row)[1]
        assert row.get("refused", "") in reason and bool(reason) == ("refused" in row), (row["gold"], reason)


def _print_rates() -> None:
    for score in (score_math, score_reference):
        print(f"{score.__name__:20} right        wrong        refused")
        sums: Counter[str] = Counter()
        for name in TABLE:
            rows, found = scored_rows(name), errors(name, score)
            totals = Counter({kind: sum(len(row[kind]) for row in rows) for kind in found})
            shares = [f"{totals[kind] - len(found[kind]):3} of {totals[kind]:3}" for kind in ("right", "wrong")]
            sums += totals
            sums.update({f"{kind} judged wrongly": len(answers) for kind, answers in found.items()})
            refused = [row for row in TABLE[name] if bool(reading(row)[1]) != ("refused" in row)]
            print(
                f"  {name:18} {shares[0]:12} {shares[1]:12} {len(refused)} of {len(TABLE[name])} refused wrongly or not"
            )
            for kind, answers in found.items():
                print(*(f"      {kind} {answer}" for answer in answers), sep="\n")
            print(*(f"      {row['gold']!r} {reading(row)[1] or 'is not refused'}" for row in refused), sep="\n")
        print(f"  {'all':18}", dict(sums))


if __name__ == "__main__":
    _print_rates()
