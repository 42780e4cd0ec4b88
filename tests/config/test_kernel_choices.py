"""Configurations know modes and chunks without `ctpo_kernels`, and know them as it does."""

from __future__ import annotations

import pytest

from ctpo_kernels import chunks, names
from ctpo_megatron.config import kernel_choices

GIB = 1 << 30


def test_the_modes_are_those_of_the_kernels() -> None:
    ours = (kernel_choices.RATIO_MODES, kernel_choices.CLIP_MODES, kernel_choices.LOSS_AGG_MODES)
    assert ours == (names.RATIO_MODES, names.CLIP_MODES, names.LOSS_AGG_MODES)


def test_the_default_chunk_is_that_of_the_kernels() -> None:
    assert chunks.CHUNK_BYTES["cuda"] == kernel_choices.DEFAULT_CHUNK


@pytest.mark.parametrize("columns", [0, 1, 18_992, 32_000, 151_936, 10**9])
def test_chunks_have_as_many_rows_as_those_of_the_kernels(columns: int) -> None:
    sizes = [edge * chunks.SHARE + by for edge in chunks.SIZES for by in (-1, 0, 1)] + [-1, 0, 80 * GIB]
    for size in sizes:
        assert kernel_choices.rows_within(size, columns) == chunks.rows_within(size, columns)
        assert kernel_choices.chunk_rows(columns, size) == chunks.chunk_rows(columns, size)
