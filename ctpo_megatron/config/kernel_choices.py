"""What configurations need to know of `ctpo_kernels`, which a login node lacks. A test compares the two."""

from __future__ import annotations

from typing import Literal, get_args

RatioName = Literal["cumprod", "geomean", "token", "sequence", "sequence-geomean"]
AggregationName = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"]

RATIO_MODES: tuple[RatioName, ...] = get_args(RatioName)
LOSS_AGG_MODES: tuple[AggregationName, ...] = get_args(AggregationName)
CLIP_MODES = ("log_power", "ratio")
"""Clip modes of the kernels; the torch form has more."""

DEFAULT_CHUNK = 1216 << 20
"""Bytes of float32 logits of one chunk on a GPU (`ctpo_kernels.chunks.CHUNK_BYTES`)."""
_SIZES = tuple(DEFAULT_CHUNK * 2 // 2**halved for halved in range(4))
_SHARE = 4
_TILE = 128


def rows_within(size: int, columns: int) -> int:
    """Rows of float32 logits with `columns` columns that fit into `size` bytes (`ctpo_kernels.chunks.rows_within`)."""
    return max(_TILE, size // (4 * max(1, columns)) // _TILE * _TILE)


def chunk_rows(columns: int, free_bytes: float) -> int:
    """Rows of a chunk for a GPU with `free_bytes` of free memory (`ctpo_kernels.chunk_rows`)."""
    fitting = (size for size in _SIZES if size * _SHARE <= free_bytes)
    return rows_within(next(fitting, _SIZES[-1]), columns)
