"""Configurations know modes and chunks without `ctpo_kernels`, and know them as it does."""

from __future__ import annotations

from typing import get_args

import pytest

from ctpo_kernels import chunks, names
from ctpo_megatron.config.objective_schema import CLIP_MODES, AggregationName, RatioName
from ctpo_megatron.plan import DEFAULT_CHUNK, chunk_rows, rows_within

GIB = 1 << 30


def test_the_modes_are_those_of_the_kernels() -> None:
    ours = (get_args(RatioName), CLIP_MODES, get_args(AggregationName))
    assert ours == (names.RATIO_MODES, names.CLIP_MODES, names.LOSS_AGG_MODES)


def test_the_default_chunk_is_that_of_the_kernels() -> None:
    assert chunks.CHUNK_BYTES["cuda"] == DEFAULT_CHUNK


@pytest.mark.parametrize("columns", [0, 1, 18_992, 32_000, 151_936, 10**9])
def test_chunks_have_as_many_rows_as_those_of_the_kernels(columns: int) -> None:
    sizes = [edge * chunks.SHARE + by for edge in chunks.SIZES for by in (-1, 0, 1)] + [-1, 0, 80 * GIB]
    for size in sizes:
        assert rows_within(size, columns) == chunks.rows_within(size, columns)
        assert chunk_rows(columns, size) == chunks.chunk_rows(columns, size)
