"""Combinations of values by a pairwise covering array: every pair in `make test`, all of them in `make test-slow`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs


def pairwise(values: Mapping[str, Sequence[Any]], *, indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over the full product of two or more factors, of which most are marked slow.

    values: argument name (or "a, b" with a tuple for each value) -> values. What stays quick holds every pair of values
    of two different factors; the choice is the same on every machine. indirect: as in `parametrize`.
    """
    factors = [range(len(choices)) for choices in values.values()]
    quick = {tuple(row) for row in AllPairs(factors)}
    rows = []
    for indices in itertools.product(*factors):
        chosen = [choices[index] for choices, index in zip(values.values(), indices, strict=True)]
        flat = [
            part for names, value in zip(values, chosen, strict=True) for part in (value if "," in names else [value])
        ]
        rows.append(pytest.param(*flat, marks=() if indices in quick else pytest.mark.slow))
    names = [name.strip() for key in values for name in key.split(",")]
    return pytest.mark.parametrize(names, rows, indirect=list(indirect))
