"""The covering array covers every pair, and what it leaves out is slow, not lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.pairwise import pairwise

pytestmark = pytest.mark.slow  # of the harness, which changes seldom

FACTORS: dict[str, list[Any]] = {
    "a, b": [(1, 2), (3, 4), (5, 6)],
    "c": [{}, {"x": 1}],
    "d": list(range(5)),
    "e": [None, True],
}


def split(mark: pytest.MarkDecorator) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Values of the quick rows and of the slow ones."""
    rows = mark.args[1]
    return [row.values for row in rows if not row.marks], [row.values for row in rows if row.marks]


def test_every_pair_is_quick_and_nothing_is_lost() -> None:
    mark = pairwise(FACTORS, indirect=["c"])
    assert mark.args[0] == ["a", "b", "c", "d", "e"] and mark.kwargs == {"indirect": ["c"]}
    quick, slow = split(mark)
    assert len(quick) + len(slow) == 3 * 2 * 5 * 2
    assert len(quick) <= 20
    factors = [[("ab", a, b), ("c", str(c)), ("d", d), ("e", e)] for a, b, c, d, e in quick]
    found = {pair for row in factors for pair in itertools.combinations(row, 2)}
    choices = [[("ab", *v) for v in FACTORS["a, b"]], [("c", str(v)) for v in FACTORS["c"]]]
    choices += [[(name, v) for v in FACTORS[name]] for name in ("d", "e")]
    wanted = {p for one, two in itertools.combinations(choices, 2) for p in itertools.product(one, two)}
    assert found == wanted


def test_the_choice_is_the_same_every_time() -> None:
    assert split(pairwise(FACTORS)) == split(pairwise(FACTORS))
