"""Arguments that the functions share: vocabulary shards, tensor-parallel groups, labels."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels.rows_torch import IGNORED_LABEL, Shard


def effective(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """None for a group of one rank, which needs no collective."""
    return None if group is None or group.size() == 1 else group


def shard_of(columns: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> Shard:
    """This rank's vocabulary shard of `columns` columns; shards follow each other in rank order.

    Raises ValueError when `vocab_size` is not positive or exceeds all shards together.
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    if vocab_size is None:
        vocab_size = columns * size
    if not 0 < vocab_size <= columns * size:
        raise ValueError(f"vocab_size must be in 1..{columns * size} (columns over all ranks); got {vocab_size}")
    return Shard(rank * columns, max(0, min(columns, vocab_size - rank * columns)))


def checked(rows: int, labels: Tensor, device: torch.device, temperature: float) -> Tensor:
    """Return the labels as int64 and contiguous, the form that kernels read.

    Raises ValueError or TypeError for labels that do not fit `[rows]` on `device`, or a temperature not above 0.
    """
    if labels.dim() != 1 or labels.numel() != rows:
        raise ValueError(f"labels has shape {list(labels.shape)}; expected [{rows}]")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers; got {labels.dtype}")
    if labels.device != device:
        raise ValueError(f"labels is on {labels.device}, the rows on {device}: move it")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite; got {temperature}")
    return labels.to(torch.int64).contiguous()


def check_range(labels: Tensor, vocab_size: int) -> None:
    """Raises ValueError for a label outside the vocabulary, where reading it needs no synchronisation (CPU)."""
    if labels.device.type != "cpu":
        return
    wrong = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= vocab_size))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(f"labels[{row}] is {int(labels[row])}; expected 0..{vocab_size - 1}, or {IGNORED_LABEL}")


def gather_parts(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's statistics `[C, 4]` -> `[tp, C, 4]` in rank order; one all-gather of 16 bytes a row."""
    if group is None:
        return parts[None]
    gathered = parts.new_empty(group.size() * parts.shape[0], 4)
    dist.all_gather_into_tensor(gathered, parts.contiguous(), group=group)
    return gathered.view(group.size(), -1, 4)
