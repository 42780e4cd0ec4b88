"""The sweep over chunks of tokens: an output layer's logits, log-probs, loss and gradients, in one pass or two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import labels as arguments
from ctpo_kernels.entropy import EntropyBonus, rows_with_gradient
from ctpo_kernels.linear_head import HeadOptions, LinearHead, leave_out
from ctpo_kernels.loss import PreparedLoss, loss_implementation, loss_stream, whole_pass
from ctpo_kernels.operands import active_rows, gather_hidden, pick, reduce_d_hidden, scatter
from ctpo_kernels.packed import PackedTokens
from ctpo_kernels.rows_torch import EntropyGradient
from ctpo_kernels.spec import LossSpec, inverse_of_loss_tokens
from ctpo_kernels.tiles import Runs, active_runs, check_known, may_learn


@dataclass(frozen=True)
class SweepPlan:
    """All inputs of a call except the operands. batch, labels: of the response tokens only; rows: their positions.

    may_learn: in host memory, see `tiles.check_known`. gradient_scale: see `fused_linear_ctpo`.
    """

    batch: PackedTokens
    spec: LossSpec
    inverse: float | Tensor
    rows: Tensor | None
    tokens: int
    labels: Tensor
    cp_group: dist.ProcessGroup | None
    sequence_parallel: bool
    skip: bool
    may_learn: Tensor | None
    entropy_coef: float
    entropy: bool
    head: HeadOptions
    gradient_scale: float = 1.0

    @classmethod
    def of(
        cls,
        prepared: PreparedLoss,
        labels: Tensor,
        cp_group: dist.ProcessGroup | None,
        known: Tensor | None = None,
        **rest: Any,
    ) -> SweepPlan:
        """Return the plan of a checked batch: rows without a response token are dropped before the first product.

        known: the remaining rows, see `active_rows`.
        """
        full, spec, inverse = prepared
        rows = active_rows(full.sampled, known)
        # Boundaries are int64 in both cases, so that one kernel serves both.
        batch = full if full.cu is full.cu_seqlens else replace(full, cu_seqlens=full.cu)
        if rows is not None:
            kept_before = torch.nn.functional.pad(full.sampled.long().cumsum(0), (1, 0))
            batch = full.select(rows, kept_before[full.cu])
        if inverse is None:
            inverse = inverse_of_loss_tokens(batch)
        return cls(batch, spec, inverse, rows, labels.numel(), pick(labels, rows), cp_group, **rest)

    def scaled(self, g: Tensor, extra: EntropyGradient | None) -> tuple[Tensor, EntropyGradient | None]:
        """Derivatives of the loss by log-probs and entropies, float32, times `gradient_scale`."""
        if self.gradient_scale == 1:
            return g, extra
        scaled = None if extra is None else EntropyGradient(extra.value, extra.g * self.gradient_scale)
        return g * self.gradient_scale, scaled

    def check_values(self, weight: Tensor) -> None:
        """Raises ValueError for a label outside the vocabulary (on the CPU only), and as `tiles.check_known`."""
        group = self.head.group
        columns = weight.shape[0] * (group.size() if group else 1)
        arguments.check_range(self.labels, self.head.vocab_size or columns)
        if self.may_learn is not None:
            check_known(self.may_learn, self.batch, entropy=self.entropy_coef != 0)


@dataclass(frozen=True)
class Swept:
    """loss: scalar. vector: statistics. log_probs, entropy: `[N]`; entropy is empty where it was not requested.

    d_hidden: `[N, H]`, or this rank's rows; d_weight: `[V / tp, H]`, in the accumulation dtype; None where not
    requested.
    """

    loss: Tensor
    vector: Tensor
    log_probs: Tensor
    entropy: Tensor
    d_hidden: Tensor | None
    d_weight: Tensor | None


class _Gradients:
    """Accumulates the gradients of `hidden` and `weight` over chunks. Either is None when not requested."""

    def __init__(self, head: LinearHead, plan: SweepPlan, d_hidden: Tensor | None, d_weight: Tensor | None) -> None:
        self.d_hidden, self.d_weight = d_hidden, d_weight
        self.wanted = d_hidden is not None or d_weight is not None
        self._head, self._plan = head, plan
        self._runs: list[Runs] | None = None

    def plan_tiles(self, flags: Callable[[], Tensor]) -> None:
        """Skip tiles of rows where flags `[M]` are 0, in all chunks; one read-back, or none with `may_learn`."""
        if self._plan.skip:
            known = self._plan.may_learn
            self._runs = active_runs(flags() if known is None else known, self._head.chunk_size)

    def begin(self, start: int, end: int, g: Tensor, extra: EntropyGradient | None) -> Runs:
        """Return the rows of a chunk to multiply, for `add`; the gradients of the other rows are written here."""
        all_of_them = [(0, end - start)]
        runs = all_of_them if self._runs is None else self._runs[start // self._head.chunk_size]
        # Clipped rows are known only now. To read them back from a GPU would wait for each chunk.
        if runs and self._plan.skip and g.device.type == "cpu":
            (runs,) = active_runs(rows_with_gradient(g, extra), end - start)
        if runs != all_of_them:
            leave_out(g, None if self.d_hidden is None else self.d_hidden[start:end], self.d_weight)
        return runs

    def add(self, dz: Tensor, start: int, runs: Runs) -> None:
        """Add the contribution of a chunk; dz `[C, V / tp]` is its gradient with respect to the logits."""
        self._head.accumulate(dz, start, self.d_hidden, self.d_weight, runs)


def sweep(hidden: Tensor, weight: Tensor, plan: SweepPlan, *, want_hidden: bool, d_weight: Tensor | None) -> Swept:
    """Run a plan. d_weight: the buffer that the weight's gradient is added to; None when it is not requested."""
    group = plan.head.group
    x = pick(gather_hidden(hidden, group, plan.sequence_parallel), plan.rows)
    head = LinearHead(x, weight, plan.labels, plan.head)
    gradients = _Gradients(head, plan, torch.empty_like(x) if want_hidden else None, d_weight)
    run = _twice if plan.spec.whole_sequence or plan.cp_group is not None else _once
    bonus = EntropyBonus(plan.batch, plan.spec, plan.inverse, plan.cp_group, plan.entropy_coef)
    vector = run(head, plan, bonus, gradients)
    d_hidden = gradients.d_hidden
    if d_hidden is not None:
        d_hidden = reduce_d_hidden(scatter(d_hidden, plan.rows, plan.tokens), group, plan.sequence_parallel)
    log_probs = scatter(plan.batch.log_probs, plan.rows, plan.tokens)
    entropy = scatter(bonus.entropy, plan.rows, plan.tokens) if plan.entropy else vector.new_empty(0)
    loss = bonus.subtracted_from(vector[0]).to(head.dtype)
    return Swept(loss, vector, log_probs, entropy, d_hidden, d_weight)


def _once(head: LinearHead, plan: SweepPlan, bonus: EntropyBonus, gradients: _Gradients) -> Tensor:
    """Fill in the log-probs of the batch, each chunk's logits computed once; returns the statistics vector."""
    batch = plan.batch
    totals = loss_implementation(batch.log_probs).segment_totals(batch) if plan.spec.per_sequence else None
    state = torch.zeros(batch.segments, 3, dtype=torch.int64, device=batch.cu.device)
    stream = loss_stream(batch, plan.spec, plan.inverse, totals=totals, state=state)
    if gradients.wanted:
        gradients.plan_tiles(lambda: may_learn(batch, entropy=plan.entropy_coef != 0))
    for start, end in head.chunks():
        merged = head.log_probs(start, end, batch.log_probs[start:end], entropy=plan.entropy)
        g = stream.step(start, end)
        g, extra = plan.scaled(g, bonus.step(start, end, merged.entropy) if plan.entropy else None)
        if gradients.wanted and (runs := gradients.begin(start, end, g, extra)):
            gradients.add(head.gradient_rows(start, end, merged, g, extra), start, runs)
    return stream.finish()


def _twice(head: LinearHead, plan: SweepPlan, bonus: EntropyBonus, gradients: _Gradients) -> Tensor:
    """The same for ratios that need all log-probs first."""
    batch = plan.batch
    lse = torch.empty_like(batch.log_probs)
    for start, end in head.chunks():
        merged = head.log_probs(start, end, batch.log_probs[start:end], entropy=plan.entropy)
        lse[start:end] = merged.lse
        if plan.entropy:
            bonus.step(start, end, merged.entropy)
    out = whole_pass(batch, plan.spec, plan.inverse, plan.cp_group)
    if not gradients.wanted:
        return out.vector
    gradients.plan_tiles(lambda: rows_with_gradient(out.gradient, bonus.gradient(0, batch.tokens)))
    for start, end in head.chunks():
        g, extra = plan.scaled(out.gradient[start:end], bonus.gradient(start, end))
        if runs := gradients.begin(start, end, g, extra):
            dz = head.recomputed_gradient_rows(start, end, lse[start:end], g, extra)
            gradients.add(dz, start, runs)
    return out.vector
