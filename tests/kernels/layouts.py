"""The same values in other memory layouts: what a caller's slices, transposes and broadcasts look like."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LAYOUTS = ("dense", "strided", "transposed", "expanded", "misaligned")
OTHER = 77  # between the values: neither a label of the tests nor a harmless number


def laid_out(values: Tensor, layout: str) -> Tensor:
    """`values` in memory of that layout, with other numbers around and between them; detached.

    "expanded" holds the first value (or row) alone and shows it everywhere: other numbers.
    """
    values = values.detach()
    if layout == "dense":
        return values.clone(memory_format=torch.contiguous_format)
    if layout == "expanded":
        return values[:1].clone().expand_as(values)
    if layout == "transposed":
        return _filled(values.shape[::-1], values).permute(*reversed(range(values.dim()))).copy_(values)
    if layout == "misaligned":  # one element behind an address that is a multiple of 16
        return _filled((values.numel() + 1,), values)[1:].view(values.shape).copy_(values)
    every_third = tuple(slice(1, None, 3) for _ in values.shape)
    return _filled(tuple(3 * size for size in values.shape), values)[every_third].copy_(values)


def _filled(shape: Sequence[int], values: Tensor) -> Tensor:
    return torch.full(tuple(shape), OTHER, dtype=torch.int64).to(values.dtype)


def cover(*names: str) -> list[dict[str, str]]:
    """Layouts of all arguments at once: every argument in every layout, neighbours not in step."""
    return [
        {name: LAYOUTS[(turn * (1 + place % 4) + place) % len(LAYOUTS)] for place, name in enumerate(names)}
        for turn in range(len(LAYOUTS))
    ]
