"""Prefix trees of a batch: which tokens are one row, which rows a row sees, and the order of a step's sequences."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctpo_megatron.data import Forest, PrefixOrder

Tokens = tuple[int, ...]
BATCHES = st.lists(st.lists(st.integers(0, 2), max_size=7).map(tuple), min_size=1, max_size=9)
"""Few different tokens: identical sequences, prefixes of others, empty ones."""


def ids_of(sequences: list[Tokens]) -> tuple[np.ndarray, list[int]]:
    bounds = [0, *itertools.accumulate(map(len, sequences))]
    return np.array([token for tokens in sequences for token in tokens], np.int64), bounds


@given(BATCHES, st.integers(1, 4))
def test_a_row_is_a_history_and_sees_what_is_before_it(sequences: list[Tokens], multiple: int) -> None:
    ids, bounds = ids_of(sequences)
    forest = Forest.of(ids, bounds, multiple)
    row_of: dict[Tokens, int] = {}
    for tokens, start in zip(sequences, bounds, strict=False):
        for depth in range(len(tokens)):
            history, row = tokens[: depth + 1], int(forest.row[start + depth])
            assert row_of.setdefault(history, row) == row and ids[forest.first[row]] == tokens[depth]
    assert sorted(row_of.values()) == [*range(forest.distinct)]
    assert forest.rows == forest.distinct + -forest.distinct % multiple
    assert [segment.start for segment in forest.segments] == [0, *(s.stop for s in forest.segments)][:-1]
    segment_of = [segment for segment in forest.segments for _ in range(segment.start, segment.stop)]
    for history, row in row_of.items():
        seen = [other for other in range(row + 1) if row < segment_of[other].end]
        assert seen == [row_of[history[: depth + 1]] for depth in range(len(history))]
        path, segment = [*range(segment_of[row].start, row + 1)], segment_of[row]
        while segment.parent >= 0:
            segment = forest.segments[segment.parent]
            path = [*range(segment.start, segment.stop), *path]
        assert path == seen


@given(BATCHES, st.data())
def test_an_order_tells_the_rows_of_any_part_of_a_step(sequences: list[Tokens], data: st.DataObject) -> None:
    order = PrefixOrder.of([np.array(tokens, np.int64) for tokens in sequences])
    members = data.draw(st.lists(st.integers(0, len(sequences) - 1), unique=True))
    walk = order.walk(members)
    assert [sequences[member] for member, _ in walk] == sorted(sequences[member] for member in members)
    forest = Forest.of(*ids_of([sequences[member] for member in members]))
    assert sum(len(sequences[member]) - shared for member, shared in walk) == forest.distinct
