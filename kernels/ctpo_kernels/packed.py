"""A checked packed batch, the input of both backends of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LossTensors(NamedTuple):
    """What a loss call receives besides its log-probs, unchecked, as `ctpo_loss` documents each."""

    old_log_probs: Tensor | None
    response_mask: Tensor
    advantages: Tensor
    cu_seqlens: Tensor
    loss_mask: Tensor | None = None
    weights: Tensor | None = None
    batch_num_tokens: int | Tensor | None = None
    global_batch_size: int | Tensor | None = None


@dataclass(frozen=True)
class PackedTokens:
    """Tokens laid end to end, on one device.

    log_probs, old_log_probs: float `[N]` nats (float32, or float64 in the torch backend); old may be None: d_t = 0.
    response_mask, loss_mask: numbers or bool `[N]`, as given; loss_mask may be None: the response mask.
    advantages, weights: float `[N]`, or `[S, 1]` for one value per segment; weights may be None: 1.
    cu_seqlens: integers `[S + 1]`, segment s is `cu[s] : cu[s + 1]`; tokens from cu[S] on are padding.

    Kernels read masks and boundaries as given, so that a call needs no launches to convert them; `sampled`, `trained`
    and `cu` are the converted ones.
    """

    log_probs: Tensor
    old_log_probs: Tensor | None
    response_mask: Tensor
    loss_mask: Tensor | None
    advantages: Tensor
    weights: Tensor | None
    cu_seqlens: Tensor

    @property
    def tokens(self) -> int:
        return self.log_probs.numel()

    @property
    def segments(self) -> int:
        return self.cu_seqlens.numel() - 1

    @cached_property
    def cu(self) -> Tensor:
        """int64 `[S + 1]`."""
        return self.cu_seqlens.to(torch.int64)

    @cached_property
    def sampled(self) -> Tensor:
        """bool `[N]`: response tokens, no padding."""
        mask, cu, n = self.response_mask != 0, self.cu, self.tokens
        if cu.device.type == "cpu" and int(cu[-1]) == n:
            return mask
        return mask & (torch.arange(n, device=cu.device) < cu[-1])

    @cached_property
    def trained(self) -> Tensor:
        """bool `[N]`: tokens whose loss counts, a subset of `sampled`."""
        return self.sampled if self.loss_mask is None else self.sampled & (self.loss_mask != 0)

    @cached_property
    def segment(self) -> Tensor:
        """int64 `[N]`: the segment of each token; S for padding."""
        return torch.searchsorted(
            self.cu[1:].contiguous(), torch.arange(self.tokens, device=self.cu.device), right=True
        )

    def per_token(self, values: Tensor) -> Tensor:
        """`[N]` from values per token or per segment; padding gets 0 of the latter."""
        return values if values.dim() == 1 else torch.cat([values[:, 0], values.new_zeros(1)])[self.segment]

    def select(self, rows: Tensor, cu: Tensor) -> PackedTokens:
        """Return the batch of the tokens `rows` (int64 `[M]`, ascending), with their boundaries `cu`."""

        def take(values: Tensor) -> Tensor:
            return values if values.dim() == 2 else values[rows]

        return self._map(take, cu)

    def window(self, start: int, end: int) -> PackedTokens:
        """Return the tokens `start : end`, with the same segments cut to that range (most of them empty)."""

        def cut(values: Tensor) -> Tensor:
            return values if values.dim() == 2 else values[start:end]

        return self._map(cut, (self.cu - start).clamp(0, end - start))

    def aligned(self) -> PackedTokens:
        """Return the same tokens at addresses that are multiples of 16 bytes, copied where they are at another.

        Triton compiles a kernel for each set of arguments that have such addresses; all from torch's allocators do.
        """
        tensors = [getattr(self, field.name) for field in fields(self)]
        if all(values is None or _is_aligned(values) for values in tensors):
            return self

        def move(values: Tensor) -> Tensor:
            return values if _is_aligned(values) else values.clone()

        return self._map(move, move(self.cu_seqlens))

    def spread(self, repeats: int, cu: Tensor) -> PackedTokens:
        """Return the same tokens with every segment as `repeats` segments, whose boundaries are `cu`."""

        def repeat(values: Tensor) -> Tensor:
            return values if values.dim() == 1 else values.repeat_interleave(repeats, dim=0)

        return self._map(repeat, cu)

    def _map(self, change: Callable[[Tensor], Tensor], cu: Tensor) -> PackedTokens:
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "cu_seqlens"}
        changed: dict[str, Any] = {name: None if values is None else change(values) for name, values in tensors.items()}
        return replace(self, cu_seqlens=cu, **changed)

    @classmethod
    def of(cls, log_probs: Tensor, given: LossTensors) -> PackedTokens:
        """Check shapes, dtypes and devices.

        The values of `cu_seqlens` are checked where that needs no device synchronisation: when it lies on the CPU.
        Raises TypeError for dtypes, ValueError for shapes, devices and boundaries; each names the argument.
        """
        device, n, cu_seqlens = log_probs.device, log_probs.numel(), given.cu_seqlens
        if log_probs.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"log_probs must be float32 or float64: the cumulative ratio adds up the rounding of {log_probs.dtype}"
            )
        if log_probs.dim() != 1:
            raise ValueError(f"log_probs must be packed [N] with cu_seqlens; got shape {list(log_probs.shape)}")
        if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            raise TypeError(f"cu_seqlens must be integers; got {cu_seqlens.dtype}")
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
            raise ValueError(f"cu_seqlens must be [B + 1]; got shape {list(cu_seqlens.shape)}")
        if cu_seqlens.device.type == "cpu":
            bounds = cu_seqlens.long()
            if int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()) or int(bounds[-1]) > n:
                raise ValueError(f"cu_seqlens must rise from 0 to at most {n}; got {cu_seqlens.tolist()}")
        b = cu_seqlens.numel() - 1
        for name in ("old_log_probs", "response_mask", "advantages", "loss_mask", "weights"):
            value = getattr(given, name)
            if value is None:
                continue
            may_be_per_sequence = name in ("advantages", "weights")
            _check_shape(name, value, n, b if may_be_per_sequence else None)
            if value.device != device:
                raise ValueError(f"{name} is on {value.device}, log_probs on {device}: move it")
        dtype = log_probs.dtype

        def column(values: Tensor) -> Tensor:
            values = values.detach().to(dtype)
            return values.reshape(n) if values.numel() == n and values.shape != (b, 1) else values.reshape(b, 1)

        def flat(values: Tensor) -> Tensor:
            return values.detach().reshape(n).contiguous()

        return cls(
            flat(log_probs),
            None if given.old_log_probs is None else flat(given.old_log_probs.to(dtype)),
            flat(given.response_mask),
            None if given.loss_mask is None else flat(given.loss_mask),
            column(given.advantages).contiguous(),
            None if given.weights is None else column(given.weights).contiguous(),
            cu_seqlens.to(device).contiguous(),
        )


def _is_aligned(values: Tensor) -> bool:
    return values.data_ptr() % 16 == 0


def _check_shape(name: str, value: Tensor, n: int, b: int | None) -> None:
    """Raises ValueError for values that are neither per token nor (b given) per sequence, or that may be either."""
    shapes: list[tuple[int, ...]] = [(n,)]
    if b is not None:
        shapes += [(b,), (1, n), (b, 1)]
    if tuple(value.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} has shape {list(value.shape)}; expected {expected}")
    if n == b and n > 1 and value.dim() == 1:
        raise ValueError(
            f"{name} [{n}] may be one value per token or one per sequence, of which there are {n} too: "
            f"give [1, {n}] or [{n}, 1]"
        )
