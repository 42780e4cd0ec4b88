"""The output layer in chunks of rows: logits exist for one chunk at a time, in float32, and never for all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import dispatch, rows_torch
from ctpo_kernels import labels as arguments
from ctpo_kernels.logprob import merge
from ctpo_kernels.rows_torch import Merged

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1216 << 20}
"""Memory for one chunk of float32 logits: below it the weight gradient is read and written too often."""

TILE = 128
"""Rows that are skipped together when none of them has a gradient."""


class LinearHead:
    """Chunked logits of `rows` hidden states, and the two gradients, for this rank's vocabulary shard.

    hidden: `[M, H]`. weight: `[V / tp, H]` of the same dtype. labels: `[M]`. Logits come from operands of that dtype
    with float32 accumulation and stay float32 (float64 operands: float64).
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        group: dist.ProcessGroup | None,
        temperature: float,
        vocab_size: int | None,
        chunk_size: int | None,
    ) -> None:
        self.hidden, self.weight, self.labels, self.group = hidden, weight, labels, group
        self.temperature = temperature
        self.shard = arguments.shard_of(weight.shape[0], vocab_size, group)
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.triton = dispatch.choose(hidden) == "triton"
        columns = weight.shape[0]
        budget = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cuda"])
        rows = chunk_size or max(TILE, budget // (4 * columns) // TILE * TILE)
        self.chunk_size = min(rows, max(1, hidden.shape[0]))
        self._buffer = hidden.new_empty(self.chunk_size, columns, dtype=self.dtype)
        # CUDA multiplies low-precision operands into float32; elsewhere one float32 copy of the weight serves.
        self._mixed = hidden.dtype != self.dtype and hidden.is_cuda
        self._operand = weight if self._mixed else weight.to(self.dtype)
        self._parts: Tensor | None = None

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Row ranges in order."""
        for start in range(0, self.hidden.shape[0], self.chunk_size):
            yield start, min(start + self.chunk_size, self.hidden.shape[0])

    def log_probs(self, start: int, end: int, *, entropy: bool = False) -> Merged:
        """Log-probs of the rows `start : end`; their logits stay in the buffer for `gradient_rows`."""
        logits, labels = self._logits(start, end), self.labels[start:end]
        if self.triton:
            from ctpo_kernels import rows_triton

            parts = rows_triton.row_stats(logits, labels, self.shard, self.temperature, entropy=entropy)
        else:
            parts = rows_torch.row_stats(logits, labels, self.shard, self.temperature, entropy=entropy)
        self._parts = parts
        return merge(arguments.gather_parts(parts, self.group), labels, self.temperature)

    def gradient_rows(self, start: int, end: int, merged: Merged, g: Tensor) -> Tensor:
        """d (sum g log_probs) / d logits of the rows that `log_probs` saw last, for `accumulate`."""
        if self.triton:
            return self._triton_gradient(start, end, merged.lse, g)
        logits, labels = self._buffer[: end - start], self.labels[start:end]
        assert self._parts is not None  # `log_probs` came first
        return rows_torch.gradient_after_stats(logits, self._parts, merged, labels, g, self.shard, self.temperature)

    def recomputed_gradient_rows(self, start: int, end: int, lse: Tensor, g: Tensor) -> Tensor:
        """The same for rows whose logits are gone and whose lse `[end - start]` was kept."""
        logits = self._logits(start, end)
        if self.triton:
            return self._triton_gradient(start, end, lse, g)
        return rows_torch.gradient(logits, lse, self.labels[start:end], g, self.shard, self.temperature)

    def _triton_gradient(self, start: int, end: int, lse: Tensor, g: Tensor) -> Tensor:
        from ctpo_kernels import rows_triton

        logits, labels = self._buffer[: end - start], self.labels[start:end]
        # Low-precision gradients take the first half of each row that they replace: no second buffer.
        out = logits.view(self.hidden.dtype)[:, : logits.shape[1]] if self._mixed else logits
        rows_triton.gradient_into(out, logits, lse, labels, g, self.shard, self.temperature)
        return out

    def _logits(self, start: int, end: int) -> Tensor:
        x, out = self.hidden[start:end], self._buffer[: end - start]
        if self._mixed:
            return torch.mm(x, self._operand.t(), out_dtype=self.dtype, out=out)
        return torch.mm(x.to(self.dtype), self._operand.t(), out=out)

    def accumulate(
        self, dz: Tensor, start: int, g: Tensor, d_hidden: Tensor | None, d_weight: Tensor | None, *, skip: bool
    ) -> None:
        """d_hidden[rows] = dz W (written), d_weight += dz^T x; dz `[C, V / tp]` belongs to the rows from `start` on.

        skip: leave out tiles of TILE rows whose `g` is zero throughout: their rows of dz are zero. d_hidden must hold
        zeros. Reads one flag a tile back to the host.
        """
        for first, last in active_runs(g) if skip else [(0, dz.shape[0])]:
            part, x = dz[first:last], self.hidden[start + first : start + last]
            if d_hidden is not None:
                target = d_hidden[start + first : start + last]
                if part.dtype == self._operand.dtype == target.dtype:
                    torch.mm(part, self._operand, out=target)
                else:
                    target.copy_(part @ self._operand.to(part.dtype))
            if d_weight is not None:
                _add_outer(d_weight, part, x)


def active_runs(g: Tensor) -> list[tuple[int, int]]:
    """Ranges of rows, in multiples of TILE, that hold all nonzero (NaN included) entries of `g` `[C]`."""
    rows = g.shape[0]
    tiles = torch.nn.functional.pad(g != 0, (0, -rows % TILE)).view(-1, TILE).any(dim=1).tolist()
    runs: list[tuple[int, int]] = []
    for tile, active in enumerate(tiles):
        first, last = tile * TILE, min((tile + 1) * TILE, rows)
        if active and runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], last)
        elif active:
            runs.append((first, last))
    return runs


def _add_outer(total: Tensor, dz: Tensor, x: Tensor) -> None:
    """total += dz^T x, accumulated in total's dtype."""
    if dz.dtype == x.dtype == total.dtype:
        total.addmm_(dz.t(), x)
    elif dz.is_cuda and dz.dtype == x.dtype and total.dtype == torch.float32:
        torch.addmm(total, dz.t(), x, out_dtype=torch.float32, out=total)
    else:
        total.add_(dz.t() @ x.to(dz.dtype))


def gather_hidden(hidden: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Rows of all tensor-parallel ranks in rank order, `[N / tp, H]` -> `[N, H]`, under sequence parallelism."""
    if group is None or not sequence_parallel:
        return hidden
    full = hidden.new_empty(hidden.shape[0] * group.size(), hidden.shape[1])
    dist.all_gather_into_tensor(full, hidden.contiguous(), group=group)
    return full


def reduce_d_hidden(d_hidden: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Sum over the vocabulary shards: `[N, H]`, or this rank's `[N / tp, H]` under sequence parallelism."""
    if group is None:
        return d_hidden
    if not sequence_parallel:
        dist.all_reduce(d_hidden, group=group)
        return d_hidden
    mine = d_hidden.new_empty(d_hidden.shape[0] // group.size(), d_hidden.shape[1])
    dist.reduce_scatter_tensor(mine, d_hidden, group=group)
    return mine


def check_operands(
    hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None, sp: bool, temperature: float
) -> int:
    """Number of tokens N; raises ValueError or TypeError naming the argument that does not fit."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden [N, H] and weight [V, H] do not fit: {list(hidden.shape)}, {list(weight.shape)}")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise TypeError(f"hidden and weight must share a floating dtype; got {hidden.dtype} and {weight.dtype}")
    if hidden.device != weight.device:
        raise ValueError(f"weight is on {weight.device}, hidden on {hidden.device}: move it")
    n = hidden.shape[0] * (group.size() if sp and group is not None else 1)
    arguments.check(n, labels, hidden.device, temperature)
    return n


def active_rows(mask: Tensor, known: Tensor | None = None) -> Tensor | None:
    """int64 `[M]` of the rows where a bool mask is set; None when it is set everywhere.

    known: these rows, if the caller has them; searching for them synchronises on CUDA. Raises ValueError when they are
    not, where seeing it needs no synchronisation (CPU).
    """
    if known is None or mask.device.type == "cpu":
        rows = mask.nonzero().squeeze(1)
        if known is not None and not torch.equal(known, rows):
            raise ValueError(
                f"rows are {known.numel()} places that are not those where the mask is set, {rows.numel()}"
            )
    else:
        rows = known
    return None if rows.numel() == mask.numel() else rows


def pick(values: Tensor, rows: Tensor | None) -> Tensor:
    """`values[rows]`, without a copy where that is all of them."""
    return values if rows is None else values.index_select(0, rows)


def scatter(values: Tensor, rows: Tensor | None, n: int) -> Tensor:
    """Inverse of `pick`: zeros elsewhere."""
    return values if rows is None else values.new_zeros(n, *values.shape[1:]).index_copy_(0, rows, values)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    *,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature)[label] of each row without the logits of all rows.

    hidden: `[N, H]`, or `[N / tp, H]` with `sequence_parallel`; weight: `[V / tp, H]`; both differentiable, one dtype.
    labels: `[N]` global ids; -100 gives 0 and no gradient. mask: `[N]`, rows to evaluate; the others give 0.
    rows: int64 `[M]`, where mask is not 0, ascending, from a caller who knows: CUDA need not be waited for then.
    chunk_size: rows whose logits exist at a time (default: what fits the memory of `CHUNK_BYTES`).
    vocab_size: real vocabulary over all ranks; columns beyond it are padding.

    Returns float32 `[N]` nats (float64 for float64 operands); with `return_entropy` also the entropy (nats, no
    gradient). Forward: one matrix product (2 M H V operations); backward: three, since logits are computed again.
    The same rows in the same chunks give the same bits as `fused_linear_ctpo`: use it for the anchor pass.
    """
    group = arguments.effective(tp_group)
    n = check_operands(hidden, weight, labels, group, sequence_parallel, temperature)
    if mask is not None and mask.shape != (n,):
        raise ValueError(f"mask has shape {list(mask.shape)}; expected [{n}]")
    active = None if mask is None else active_rows(mask != 0, rows)
    head = {"group": group, "temperature": temperature, "vocab_size": vocab_size, "chunk_size": chunk_size}
    chosen = pick(labels, active)
    arguments.check_range(chosen, vocab_size or weight.shape[0] * (group.size() if group else 1))
    log_probs, entropy = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]  # torch does not type `apply`
        hidden, weight, chosen, active, n, sequence_parallel, return_entropy, head
    )
    return (log_probs, entropy) if return_entropy else log_probs


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: Tensor | None,
        n: int,
        sequence_parallel: bool,
        entropy: bool,
        settings: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        x = pick(gather_hidden(hidden, settings["group"], sequence_parallel), rows)
        head = LinearHead(x, weight, labels, **settings)
        found = [head.log_probs(start, end, entropy=entropy) for start, end in head.chunks()]
        none = x.new_empty(0, dtype=head.dtype)
        lse, log_probs, entropies = (
            torch.cat([none, *(getattr(merged, name) for merged in found)]) for name in ("lse", "log_probs", "entropy")
        )
        ctx.save_for_backward(hidden, weight, labels, rows, lse)
        ctx.settings, ctx.n, ctx.sequence_parallel = settings, n, sequence_parallel
        entropies = scatter(entropies, rows, n)
        ctx.mark_non_differentiable(entropies)
        return scatter(log_probs, rows, n), entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, rows, lse = ctx.saved_tensors
        group = ctx.settings["group"]
        head = LinearHead(
            pick(gather_hidden(hidden, group, ctx.sequence_parallel), rows), weight, labels, **ctx.settings
        )
        g = torch.where(labels == rows_torch.IGNORED_LABEL, 0.0, pick(upstream, rows))
        d_hidden = torch.zeros_like(head.hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=head.dtype) if ctx.needs_input_grad[1] else None
        for start, end in head.chunks():
            part = g[start:end]
            dz = head.recomputed_gradient_rows(start, end, lse[start:end], part)
            head.accumulate(dz, start, part, d_hidden, d_weight, skip=False)
        if d_hidden is not None:
            d_hidden = reduce_d_hidden(scatter(d_hidden, rows, ctx.n), group, ctx.sequence_parallel)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *[None] * 6
