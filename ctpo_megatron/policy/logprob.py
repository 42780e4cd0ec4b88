"""Per-token log-probabilities (and entropy) from vocabulary-parallel logits, in fp32, with a local backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _VocabParallelLogProbs(torch.autograd.Function):
    """log softmax(z)[label] over logits whose vocabulary is split across a tensor-parallel group.

    Two all-reduces: the row maxima, then the stacked [sum exp, target logit]. The backward is local:
    d logp / dz = onehot(label) - softmax(z).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup | None, vocab_start: int
    ) -> torch.Tensor:
        top = logits.amax(dim=-1)
        if group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        exp = (logits - top[:, None]).exp_()
        local = labels - vocab_start
        owned = (local >= 0) & (local < logits.shape[-1])
        local = local.where(owned, 0)
        target = (logits.gather(1, local[:, None]).squeeze(1) - top).where(owned, 0.0)
        parts = torch.stack([exp.sum(dim=-1), target])
        if group is not None:
            dist.all_reduce(parts, group=group)
        total, target = parts
        ctx.save_for_backward(exp, total, local, owned)
        return target - total.log()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        exp, total, local, owned = ctx.saved_tensors
        out = exp * (-grad / total)[:, None]
        out.scatter_add_(1, local[:, None], (grad * owned)[:, None])
        return out, None, None, None


def vocab_parallel_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """log p(label) of each row under softmax(logits / temperature) over the first `vocab_size` columns.

    logits: [N, V_padded / tp], this rank's columns, any float dtype (computed in fp32).
    labels: [N] int64, global vocabulary ids. Returns [N] fp32 (nats). Padding columns never enter the sum.
    """
    prepared, start, group = _prepare(logits, vocab_size, temperature, group)
    return _VocabParallelLogProbs.apply(prepared, labels, group, start)


@torch.no_grad()
def vocab_parallel_entropy(
    logits: torch.Tensor, *, vocab_size: int, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Entropy (nats, [N] fp32) of each row's softmax; arguments as `vocab_parallel_log_probs`. No gradient."""
    z, _, group = _prepare(logits, vocab_size, temperature, group)
    top = z.amax(dim=-1)
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = z - top[:, None]
    exp = shifted.exp()
    parts = torch.stack([exp.sum(dim=-1), (exp * shifted.clamp(min=torch.finfo(z.dtype).min)).sum(dim=-1)])
    if group is not None:
        dist.all_reduce(parts, group=group)
    return parts[0].log() - parts[1] / parts[0]


def _prepare(
    logits: torch.Tensor, vocab_size: int, temperature: float, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, int, dist.ProcessGroup | None]:
    if group is not None and group.size() == 1:
        group = None
    columns = logits.shape[-1]
    start = group.rank() * columns if group is not None else 0
    z = logits.float()
    if temperature != 1.0:
        z = z / temperature
    padding = start + columns - vocab_size
    if padding > 0:
        columns_here = torch.arange(start, start + columns, device=z.device)
        z = z.masked_fill(columns_here >= vocab_size, float("-inf"))
    return z, start, group
