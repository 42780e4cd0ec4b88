"""Context parallelism: which tokens of a packed micro-batch this rank holds, and the targets of its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctpo_megatron.base.host_copies import all_to_device, to_device
from ctpo_megatron.data import Forest, PackedBatch


@dataclass(frozen=True)
class ContextSplit:
    """The zigzag split of every sequence into 2R equal pieces; rank r of R holds the pieces r and 2R - 1 - r.

    So every rank has the same work under causal attention; megatron-core's rotary embedding and transformer-engine's
    attention expect this split. Sequence lengths must be multiples of 2R (`PackingRules.sequence_multiple`).

    group: None, or of one rank: nothing is cut. rows: int64 `[N / R]`, the tokens of this rank. restore: int64 `[N]`,
    the index of each token in the concatenation of the rows of all ranks. Both are empty when one rank holds
    everything. cu_seqlens: `[B + 1]`, boundaries of the sequences among the rows. planned: the same split in host
    memory; None if this object is in host memory.
    """

    group: dist.ProcessGroup | None
    rows: Tensor
    restore: Tensor
    cu_seqlens: Tensor
    planned: ContextSplit | None = None

    @property
    def on_host(self) -> ContextSplit:
        """The split in host memory."""
        return self.planned or self

    def to(self, device: torch.device) -> ContextSplit:
        """Return the split on a device; the host does not wait for the copy."""
        rows, restore, cu_seqlens = all_to_device([self.rows, self.restore, self.cu_seqlens], device)
        return replace(self, rows=rows, restore=restore, cu_seqlens=cu_seqlens, planned=self.on_host)

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> ContextSplit:
        """Return the split of a micro-batch with these boundaries `[B + 1]`, on the host, over the context-parallel
        group.
        """
        group = mpu.get_context_parallel_group()
        size, rank = group.size(), group.rank()
        if size == 1:
            nothing = cu_seqlens.new_empty(0, dtype=torch.int64)
            return cls(group, nothing, nothing, cu_seqlens)
        lengths = cu_seqlens.diff().long()
        starts, spread = cu_seqlens[:-1].long(), lengths.repeat_interleave(lengths)
        position = torch.arange(spread.numel(), device=cu_seqlens.device) - starts.repeat_interleave(lengths)
        piece = position * (2 * size) // spread
        owner = torch.minimum(piece, 2 * size - 1 - piece)
        order = torch.argsort(owner, stable=True)  # rank 0's tokens, then rank 1's, each in the order of the batch
        return cls(group, (owner == rank).nonzero().squeeze(1), torch.argsort(order), cu_seqlens // size)

    @property
    def size(self) -> int:
        """R."""
        return 1 if self.group is None else self.group.size()

    @property
    def whole(self) -> bool:
        """Whether one rank holds everything."""
        return self.size == 1

    @property
    def unsplit(self) -> ContextSplit:
        """The same sequences on one rank."""
        return replace(self, group=None, cu_seqlens=self.cu_seqlens * self.size, planned=None)

    def take(self, values: Tensor) -> Tensor:
        """`[N, ...]` -> this rank's `[N / R, ...]`."""
        return values if self.whole else values[self.rows]

    def gather(self, values: Tensor) -> Tensor:
        """Inverse of `take` over all ranks of the group, without gradients; collective."""
        if self.whole:
            return values
        found = values.new_empty(values.shape[0] * self.size, *values.shape[1:])
        dist.all_gather_into_tensor(found, values.contiguous(), group=self.group)
        return found[self.restore]

    def join(self, values: Tensor) -> Tensor:
        """As `gather`, but differentiable in the values of this rank."""
        return values if self.whole else self.gather(values.detach()).index_copy(0, self.rows, values)


@dataclass(frozen=True)
class SharedRows:
    """Distinct predictions of a forest: m pairs of an output row and a label, of the M rows in `Targets.rows`.

    source: int64 `[m]`, the output row of each. token: int64 `[m]`, a token whose label each predicts. pair: int64
    `[M]`, which of them each of the M rows is.
    """

    source: Tensor
    token: Tensor
    pair: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, forest: Forest, predicting: Tensor) -> SharedRows:
        """Return the pairs of `Targets.rows`, made once for all passes."""

        def pairs() -> SharedRows:
            tokens = predicting.numpy()
            # The row of the label, as children of a row have different tokens.
            _, at, pair = np.unique(forest.row[tokens + 1], return_index=True, return_inverse=True)
            parts = (forest.row[tokens[at]], tokens[at], pair.reshape(-1))
            return cls(*all_to_device([torch.from_numpy(each) for each in parts], batch.token_ids.device))

        return forest.derive(cls, pairs)

    def spread(self, values: Tensor) -> Tensor:
        """`[m]` of the pairs -> `[M]`, differentiable."""
        return gather_rows(values, self.pair)


@dataclass(frozen=True)
class Targets:
    """The targets of the rows of this rank; row t of a sequence predicts its token t + 1.

    All `[n]`, n = N / context-parallel size. labels: int32; response_mask, loss_mask: bool; rollout_log_probs,
    advantages, old_log_probs (None before they are computed), weights (of the correction, None without): float32.
    weight_version: int32. turn, group: int16 and int32, None without.
    cu_seqlens: `[B + 1]`, boundaries among them. on_policy: see `PackedBatch`.
    rows: int64 `[M]`, where response_mask is set, ascending; computed on the host. in_loss, may_learn: bool `[M]` in
    host memory, which of them are in the loss, and which with a nonzero advantage. batch: what they are targets of.
    shared: where the output has distinct prefixes in place of tokens.
    """

    labels: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    rollout_log_probs: Tensor
    weight_version: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None
    weights: Tensor | None
    split: ContextSplit
    rows: Tensor
    in_loss: Tensor
    may_learn: Tensor
    on_policy: bool
    batch: PackedBatch
    turn: Tensor | None = None
    group: Tensor | None = None
    shared: SharedRows | None = None

    @classmethod
    def of(cls, batch: PackedBatch, split: ContextSplit) -> Targets:
        """Return the targets of this rank's rows."""

        def next_of(values: Tensor) -> Tensor:
            # The first token of a sequence is never a response token, so the value that rolls into the row before it is
            # masked.
            return split.take(values.roll(-1))

        host = batch.on_host
        predicting = split.on_host.take(host.response_mask.roll(-1)).nonzero().squeeze(1)
        in_loss, learning = (
            split.on_host.take(mask.roll(-1))[predicting]
            for mask in (host.loss_mask, host.loss_mask & (host.advantages != 0))
        )
        return cls(
            labels=next_of(batch.token_ids),
            response_mask=next_of(batch.response_mask),
            loss_mask=next_of(batch.loss_mask),
            rollout_log_probs=next_of(batch.rollout_log_probs),
            weight_version=next_of(batch.weight_version),
            advantages=next_of(batch.advantages),
            old_log_probs=None if batch.old_log_probs is None else next_of(batch.old_log_probs),
            weights=None if batch.correction_weights is None else next_of(batch.correction_weights),
            split=split,
            rows=to_device(predicting, batch.response_mask.device),
            in_loss=in_loss,
            may_learn=learning,
            on_policy=batch.on_policy,
            batch=batch,
            turn=None if batch.turn is None else next_of(batch.turn),
            group=None if batch.group is None else next_of(batch.group),
            shared=None if batch.forest is None else SharedRows.of(batch, batch.forest, predicting),
        )

    @property
    def cu_seqlens(self) -> Tensor:
        return self.split.cu_seqlens

    @property
    def of_loss(self) -> dict[str, Any]:
        """What every loss takes of these rows besides log-probs, by its parameters' names."""
        return {
            "advantages": self.advantages,
            "response_mask": self.response_mask,
            "loss_mask": self.loss_mask,
            "weights": self.weights,
            "cu_seqlens": self.cu_seqlens,
        }

    def of_whole_sequences(self) -> Targets:
        """Return the targets of all rows of the batch, which every context-parallel rank knows."""
        return self if self.split.whole else Targets.of(self.batch, self.split.unsplit)

    def per_token(self, values: Tensor) -> Tensor:
        """`[n]` of the rows -> `[N]` aligned with the tokens they predict, on every context-parallel rank; detached."""
        return self.split.gather(values.detach()).roll(1)


def take_rows(t: Tensor, at: Tensor, back: Tensor) -> Tensor:
    """Rows `at` of t `[n, ...]`. back: `[n]`, the index in `at` from which each row of t gets its gradient."""
    found: Tensor = _Rows.apply(t, at, back)  # type: ignore[no-untyped-call]
    return found


def gather_rows(t: Tensor, at: Tensor) -> Tensor:
    """Rows `at` of t `[n, ...]`, which may come several times: their gradients add up in float32, in a fixed order."""
    found: Tensor = _GatheredRows.apply(t, at)  # type: ignore[no-untyped-call]
    return found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, at: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return t.index_select(0, at)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.count, ctx.dtype = t.shape[0], t.dtype
        return t.index_select(0, at)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (at,), grad = ctx.saved_tensors, grads[0]
        total = grad.new_zeros(ctx.count, *grad.shape[1:], dtype=torch.promote_types(grad.dtype, torch.float32))
        if total.is_cuda:  # there `index_add_` adds in any order, and this sorts
            total.index_put_((at,), grad.to(total.dtype), accumulate=True)
        else:
            total.index_add_(0, at, grad.to(total.dtype))
        return total.to(ctx.dtype), None
