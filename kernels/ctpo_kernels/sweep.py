"""The sweep over chunks of tokens: an output layer's logits, log-probs, loss and gradients, in one pass or two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import labels as arguments
from ctpo_kernels.entropy import EntropyBonus, rows_with_gradient
from ctpo_kernels.linear_head import LinearHead
from ctpo_kernels.loss import loss_implementation, whole_pass
from ctpo_kernels.operands import active_rows, gather_hidden, pick, reduce_d_hidden, scatter
from ctpo_kernels.packed import PackedTokens
from ctpo_kernels.spec import LossSpec, inverse_of_loss_tokens

Prepared = tuple[PackedTokens, LossSpec, float | Tensor | None]
"""What `loss.prepared` gives."""


@dataclass(frozen=True)
class Plan:
    """Everything of a call that is no operand. batch, labels: of the response tokens only; rows: where they are."""

    batch: PackedTokens
    spec: LossSpec
    inverse: float | Tensor
    rows: Tensor | None
    tokens: int
    labels: Tensor
    cp_group: dist.ProcessGroup | None
    sequence_parallel: bool
    skip: bool
    entropy_coef: float
    entropy: bool
    head: dict[str, Any]

    @classmethod
    def of(
        cls,
        prepared: Prepared,
        labels: Tensor,
        cp_group: dist.ProcessGroup | None,
        known: Tensor | None = None,
        **rest: Any,
    ) -> Plan:
        """The plan of a checked batch: rows without a response token leave before the first product.

        known: the rows that stay, see `active_rows`.
        """
        full, spec, inverse = prepared
        rows = active_rows(full.sampled, known)
        batch = full
        if rows is not None:
            kept_before = torch.nn.functional.pad(full.sampled.long().cumsum(0), (1, 0))
            batch = full.select(rows, kept_before[full.cu])
        if inverse is None:
            inverse = inverse_of_loss_tokens(batch)
        return cls(batch, spec, inverse, rows, labels.numel(), pick(labels, rows), cp_group, **rest)

    def check_labels(self, weight: Tensor) -> None:
        """Raises ValueError for a label outside the vocabulary, on the CPU."""
        group = self.head["group"]
        columns = weight.shape[0] * (group.size() if group else 1)
        arguments.check_range(self.labels, self.head["vocab_size"] or columns)


@dataclass(frozen=True)
class Swept:
    """loss: scalar. vector: statistics. log_probs, entropy: `[N]`; entropy is empty where nobody asked for it.

    d_hidden: `[N, H]`, or this rank's rows; d_weight: `[V / tp, H]`, in the dtype of the sums; None where not wanted.
    """

    loss: Tensor
    vector: Tensor
    log_probs: Tensor
    entropy: Tensor
    d_hidden: Tensor | None
    d_weight: Tensor | None


def sweep(hidden: Tensor, weight: Tensor, plan: Plan, *, want_hidden: bool, d_weight: Tensor | None) -> Swept:
    """All of it. d_weight: what the weight's gradient is added to; None where it is not wanted."""
    group = plan.head["group"]
    x = pick(gather_hidden(hidden, group, plan.sequence_parallel), plan.rows)
    head = LinearHead(x, weight, plan.labels, **plan.head)
    d_hidden = torch.zeros_like(x) if want_hidden else None

    def accumulate(dz: Tensor, start: int, g: Tensor) -> None:
        head.accumulate(dz, start, g, d_hidden, d_weight, skip=plan.skip)

    run = _twice if plan.spec.whole_sequence or plan.cp_group is not None else _once
    bonus = EntropyBonus(plan.batch, plan.spec, plan.inverse, plan.cp_group, plan.entropy_coef)
    log_probs, vector = run(head, plan, bonus, accumulate if want_hidden or d_weight is not None else None)
    if d_hidden is not None:
        d_hidden = reduce_d_hidden(scatter(d_hidden, plan.rows, plan.tokens), group, plan.sequence_parallel)
    log_probs = scatter(log_probs, plan.rows, plan.tokens)
    entropy = scatter(bonus.entropy, plan.rows, plan.tokens) if plan.entropy else vector.new_empty(0)
    loss = bonus.subtracted_from(vector[0]).to(head.dtype)
    return Swept(loss, vector, log_probs, entropy, d_hidden, d_weight)


Accumulate = Callable[[Tensor, int, Tensor], None] | None


def _once(head: LinearHead, plan: Plan, bonus: EntropyBonus, accumulate: Accumulate) -> tuple[Tensor, Tensor]:
    """Log-probs `[M]` and the statistics vector; logits of every chunk are computed once."""
    implementation = loss_implementation(plan.batch.log_probs)
    totals = implementation.segment_totals(plan.batch) if plan.spec.per_sequence else None
    state = torch.zeros(plan.batch.segments, 3, dtype=torch.int64, device=plan.batch.cu.device)
    stream = implementation.LossStream(plan.batch, plan.spec, plan.inverse, totals=totals, state=state)
    for start, end in head.chunks():
        merged = head.log_probs(start, end, entropy=plan.entropy)
        g = stream.step(start, end, merged.log_probs)
        extra = bonus.step(start, end, merged.entropy) if plan.entropy else None
        if accumulate is not None:
            accumulate(head.gradient_rows(start, end, merged, g, extra), start, rows_with_gradient(g, extra))
    return plan.batch.log_probs, stream.finish()


def _twice(head: LinearHead, plan: Plan, bonus: EntropyBonus, accumulate: Accumulate) -> tuple[Tensor, Tensor]:
    """The same when the ratio needs all log-probs first."""
    lse = torch.empty_like(plan.batch.log_probs)
    for start, end in head.chunks():
        merged = head.log_probs(start, end, entropy=plan.entropy)
        plan.batch.log_probs[start:end], lse[start:end] = merged.log_probs, merged.lse
        if plan.entropy:
            bonus.step(start, end, merged.entropy)
    out = whole_pass(plan.batch, plan.spec, plan.inverse, plan.cp_group)
    if accumulate is not None:
        for start, end in head.chunks():
            g, extra = out.gradient[start:end], bonus.gradient(start, end)
            dz = head.recomputed_gradient_rows(start, end, lse[start:end], g, extra)
            accumulate(dz, start, rows_with_gradient(g, extra))
    return plan.batch.log_probs, out.vector
