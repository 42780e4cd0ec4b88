"""Boundaries of the sequences of a batch: one view of padded `[B, T]` and packed `[N]` tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceBounds:
    """Sequence boundaries of a batch seen as flat `[N]` tokens. Everything below works on this flat form.

    A padded `[B, T]` batch is a packed batch in which every sequence has T tokens and the padding is masked. So there
    is one code path, and padded and packed batches agree by construction.

    shape: shape of the caller's token tensors, `[B, T]` or `[N]`.
    cu_seqlens: int64 `[B + 1]`, sequence b is `cu_seqlens[b] : cu_seqlens[b + 1]`.
    sequence_id: int64 `[N]`, the sequence of each token; B for padding after the last sequence.
    """

    shape: torch.Size
    cu_seqlens: Tensor
    sequence_id: Tensor

    @classmethod
    def of(cls, tokens: Tensor, cu_seqlens: Tensor | None) -> SequenceBounds:
        """The layout of `tokens`, `[B, T]` without `cu_seqlens` or `[N]` with `cu_seqlens` `[B + 1]`.

        Positions from `cu_seqlens[-1]` on are padding and belong to no sequence. Raises ValueError for other shapes,
        and for boundaries that do not start at 0, decrease, or exceed N. The values are checked on the CPU only, where
        that needs no synchronisation.
        """
        device, n = tokens.device, tokens.numel()
        if cu_seqlens is None:
            if tokens.dim() != 2:
                raise ValueError(f"tokens of shape {tuple(tokens.shape)} need cu_seqlens; without it give [B, T]")
            rows, width = tokens.shape
            boundaries = torch.arange(rows + 1, device=device) * width
        else:
            if tokens.dim() != 1 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
                raise ValueError(
                    f"cu_seqlens must be an integer [B + 1] tensor for tokens [N]; got {cu_seqlens.dtype} "
                    f"{tuple(cu_seqlens.shape)} for {tuple(tokens.shape)}"
                )
            if cu_seqlens.device.type == "cpu":
                decreasing = bool((cu_seqlens.diff() < 0).any())
                if int(cu_seqlens[0]) != 0 or decreasing or int(cu_seqlens[-1]) > n:
                    raise ValueError(f"cu_seqlens must rise from 0 to at most {n}; got {cu_seqlens.tolist()}")
            boundaries = cu_seqlens.to(device=device, dtype=torch.int64)
        # right=True assigns a token to the first sequence that ends after it, which skips empty sequences.
        sequence_id = torch.searchsorted(boundaries[1:].contiguous(), torch.arange(n, device=device), right=True)
        return cls(tokens.shape, boundaries, sequence_id)

    @property
    def sequences(self) -> int:
        """B, empty and fully masked sequences included."""
        return self.cu_seqlens.numel() - 1

    def mask(self, mask: Tensor, name: str) -> Tensor:
        """A 0/1 mask in the caller's shape as bool `[N]`, false on padding after the last sequence."""
        if mask.shape != self.shape:
            raise ValueError(f"{name} has shape {tuple(mask.shape)}; expected {tuple(self.shape)}")
        return (mask.to(self.sequence_id.device) != 0).reshape(-1) & (self.sequence_id < self.sequences)

    def masks(self, response_mask: Tensor, loss_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """bool `[N]` each: which tokens the policy sampled, and which count in the loss (None: all of these)."""
        model = self.mask(response_mask, "response_mask")
        return model, model if loss_mask is None else model & self.mask(loss_mask, "loss_mask")

    def values(self, values: Tensor, name: str, dtype: torch.dtype, *, per_sequence: bool = False) -> Tensor:
        """Per-token values in the caller's shape as `[N]` of `dtype`; with `per_sequence` also `[B]`, broadcast.

        A flat tensor with N == B is read as per token.
        """
        if values.shape == self.shape:
            return values.reshape(-1).to(dtype)
        if per_sequence and values.shape == (self.sequences,):
            return self.to_tokens(values.to(dtype))
        also = f" or [{self.sequences}]" if per_sequence else ""
        raise ValueError(f"{name} has shape {tuple(values.shape)}; expected {list(self.shape)}{also}")

    def to_tokens(self, per_sequence: Tensor) -> Tensor:
        """`[B]` -> `[N]`: every token gets the value of its sequence, padding gets 0."""
        return torch.cat([per_sequence, per_sequence.new_zeros(1)])[self.sequence_id]

    def cumulative_sum(self, values: Tensor) -> Tensor:
        """Inclusive running sum of int64 `[N]` that restarts at every sequence."""
        before = self._exclusive(values)
        return before[1:] - self.to_tokens(before[self.cu_seqlens[:-1]])

    def total(self, values: Tensor) -> Tensor:
        """int64 `[N]` -> `[B]`: the sum over each sequence."""
        before = self._exclusive(values)
        return before[self.cu_seqlens[1:]] - before[self.cu_seqlens[:-1]]

    @staticmethod
    def _exclusive(values: Tensor) -> Tensor:
        """`[N]` -> `[N + 1]`: the sum before each position. A sum over the whole batch and a subtraction are exact only
        for integers: in floating point the rounding of earlier sequences would remain."""
        if values.dtype != torch.int64:
            raise TypeError(f"segmented sums are exact for int64 only; got {values.dtype}")
        return torch.cat([values.new_zeros(1), values.cumsum(0)])
