"""Which tiles of rows the gradient products skip: those without any gradient.

The rows in the loss are known before the sweep, so the tiles of all chunks are planned with one read-back, or with none
when the caller knows the rows. Clipped rows are known only once the log-probs of their chunk are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctpo_kernels.chunks import TILE
from ctpo_kernels.packed import PackedTokens

Runs = list[tuple[int, int]]
"""Ranges of rows of one chunk, in order, in multiples of TILE."""


def active_runs(flags: Tensor, chunk_size: int) -> list[Runs]:
    """For each chunk of `chunk_size` rows, the ranges that hold all nonzero (NaN included) entries of flags `[M]`.

    Reads back one flag per tile when the flags are on a device.
    """
    rows = flags.shape[0]
    if rows == 0:
        return []
    pad = torch.nn.functional.pad
    chunks = pad(flags != 0, (0, -rows % chunk_size)).view(-1, chunk_size)
    tiles = pad(chunks, (0, -chunk_size % TILE)).view(chunks.shape[0], -1, TILE).any(dim=2).tolist()
    return [_runs(active, min(chunk_size, rows - i * chunk_size)) for i, active in enumerate(tiles)]


def _runs(active: list[bool], rows: int) -> Runs:
    runs: Runs = []
    for tile, wanted in enumerate(active):
        first, last = tile * TILE, min((tile + 1) * TILE, rows)
        if wanted and runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], last)
        elif wanted:
            runs.append((first, last))
    return runs


def may_learn(batch: PackedTokens, *, entropy: bool) -> Tensor:
    """bool `[M]`: not set for rows whose gradient is zero for any log-probs that are not NaN.

    entropy: every row in the loss has the gradient of its entropy.
    """
    nonzero = batch.trained
    for values in () if entropy else (batch.advantages, batch.weights):
        if values is not None:
            nonzero = nonzero & (batch.per_token(values) != 0)
    return nonzero


def check_known(known: Tensor, batch: PackedTokens, *, entropy: bool) -> None:
    """Raises ValueError where `known` cannot replace `may_learn`; its values are checked on the CPU only."""
    rows = batch.tokens
    if known.dtype != torch.bool or known.device.type != "cpu" or known.shape != (rows,):
        raise ValueError(
            f"may_learn must be bool [{rows}] in host memory, one value for each of `rows`; got {known.dtype} "
            f"{list(known.shape)} on {known.device}"
        )
    if batch.cu.device.type == "cpu" and bool((left_out := may_learn(batch, entropy=entropy) & ~known).any()):
        raise ValueError(f"may_learn leaves out {int(left_out.sum())} rows that may have a gradient")
