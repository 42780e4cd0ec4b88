"""What every rank of test_kernels_parallel runs."""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import ctpo_loss, linear_log_probs, vocab_parallel_log_probs
from tests.kernels.heads import Head, Swept, random_head, sweep
from tests.kernels.packings import random_batch, run, without
from tests.support.backends import use_backend
from tests.support.deadlines import scaled

RANKS = 2
LENGTHS = [16, 4, 0, 8]  # multiples of 2 R, for the pieces of context parallelism
RATIOS = ["cumprod", "geomean", "token", "sequence", "sequence-geomean"]
VOCABS = {"padding in the last shard": (50, 6), "last shard all padding": (20, 36)}  # real columns, padding
TOKENS = 20  # loss tokens of the "step", given from outside


def head_of(name: str, dtype: torch.dtype) -> Head:
    """The whole head, as one process holds it: 2 x 28 columns."""
    vocab, padded = VOCABS[name]
    head = random_head(1, LENGTHS, vocab=vocab, padded=padded, temperature=0.8)
    return head.double() if dtype == torch.float64 else head


def zigzag_rows(rank: int, lengths: list[int] = LENGTHS, ranks: int = RANKS) -> Tensor:
    """Rows that a context-parallel rank holds: the pieces r and 2R - 1 - r of 2R of every sequence."""
    rows, start = [], 0
    for length in lengths:
        size = length // (2 * ranks)
        for piece in (rank, 2 * ranks - 1 - rank):
            rows += range(start + piece * size, start + (piece + 1) * size)
        start += length
    return torch.tensor(rows, dtype=torch.int64)


def local(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A context-parallel rank's share of a packed batch."""
    rows = zigzag_rows(rank)
    tokens = without(batch, "cu_seqlens")
    mine = {name: value if value.shape == (len(LENGTHS),) else value[rows] for name, value in tokens.items()}
    return mine | {"cu_seqlens": batch["cu_seqlens"] // RANKS}


def case_batch(dtype: torch.dtype) -> dict[str, Tensor]:
    batch = random_batch(3, LENGTHS, dtype=dtype)
    batch["log_probs"] = batch["log_probs"] + (0.01 * torch.sin(torch.arange(28.0))).to(dtype)
    batch["weights"] = torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=dtype)
    return batch


def main() -> dict[Any, Any]:
    """One rank: every case on every backend."""
    os.environ["TRITON_INTERPRET"] = "1"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=scaled(60)))
    import importlib.util

    from tests.kernels.harness import observed

    cases = [("torch", torch.float64), ("torch", torch.float32)]
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        cases.append(("triton", torch.float32))
    results = {}
    for backend, dtype in cases:
        torch.manual_seed(0)
        with use_backend(backend), observed() if backend == "triton" else contextlib.nullcontext():
            results[backend, dtype] = run_cases(dist.get_rank(), dtype)
    dist.destroy_process_group()
    return results


def run_cases(rank: int, dtype: torch.dtype) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for name in VOCABS:
        out["head", name] = tensor_parallel(rank, head_of(name, dtype))
        out["log probs", name] = log_probs(rank, head_of(name, dtype))
    name = next(iter(VOCABS))
    out["sequence parallel"] = tensor_parallel(rank, head_of(name, dtype), sequence_parallel=True)
    out["sequence parallel log probs"] = log_probs(rank, head_of(name, dtype), sequence_parallel=True)
    out["main grad"] = tensor_parallel(rank, head_of(name, dtype), accumulate_into_main_grad=True)
    for ratio in RATIOS:
        out["context parallel", ratio] = context_parallel(rank, case_batch(dtype), ratio_mode=ratio)
    out["context parallel", "token-mean"] = context_parallel(
        rank, case_batch(dtype), loss_agg_mode="token-mean", batch_num_tokens=TOKENS, clip_power=0.3
    )
    for ratio in ("cumprod", "sequence-geomean"):
        out["context parallel head", ratio] = context_parallel_head(rank, head_of(name, dtype), ratio_mode=ratio)
    out["refusals"] = refusals(case_batch(dtype))
    return out


def shard(weight: Tensor, rank: int) -> Tensor:
    columns = weight.shape[0] // RANKS
    return weight[rank * columns : (rank + 1) * columns]


def tensor_parallel(rank: int, head: Head, **options: bool) -> dict[str, Any]:
    n = head.hidden.shape[0]
    rows = slice(rank * n // RANKS, (rank + 1) * n // RANKS) if options.get("sequence_parallel") else slice(None)
    mine = replace(head, hidden=head.hidden[rows], weight=shard(head.weight, rank))
    return fields_of(sweep(mine, tp_group=dist.group.WORLD, chunk_size=16, **options))


def fields_of(found: Swept) -> dict[str, Any]:
    stats = torch.cat([found.stats.sums, found.stats.maxima])
    names = ("loss", "log_probs", "d_hidden", "d_weight")
    return {name: getattr(found, name) for name in names} | {"stats": stats}


def log_probs(rank: int, head: Head, *, sequence_parallel: bool = False) -> dict[str, Any]:
    """Both log-prob functions, the upstream gradients known functions of the row."""
    n = head.hidden.shape[0]
    labels = head.labels.clamp(min=0)
    g = torch.sin(torch.arange(n, dtype=head.hidden.dtype))
    settings = {"temperature": head.temperature, "vocab_size": head.vocab_size, "return_entropy": True}
    rows = slice(rank * n // RANKS, (rank + 1) * n // RANKS) if sequence_parallel else slice(None)
    hidden, weight = head.hidden[rows].clone().requires_grad_(), shard(head.weight, rank).clone().requires_grad_()
    log_probs, entropy = linear_log_probs(
        hidden, weight, labels, dist.group.WORLD, sequence_parallel, chunk_size=16, **settings
    )
    torch.autograd.backward((log_probs, entropy), (g, g.flip(0)))
    found = {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "d_hidden": hidden.grad,
        "d_weight": weight.grad,
    }
    if not sequence_parallel:
        logits = (head.hidden @ shard(head.weight, rank).T).requires_grad_()
        given, given_entropy = vocab_parallel_log_probs(logits, labels, dist.group.WORLD, **settings)
        torch.autograd.backward((given, given_entropy), (g, g.flip(0)))
        found |= {"given": given.detach(), "given_entropy": given_entropy.detach(), "d_logits": logits.grad}
    return found


def context_parallel(rank: int, batch: dict[str, Tensor], **keywords: Any) -> dict[str, Any]:
    found = run(local(batch, rank), cp_group=dist.group.WORLD, **keywords)
    return {
        "loss": found.loss,
        "gradient": found.gradient,
        "stats": torch.cat([found.stats.sums, found.stats.maxima]),
        "prefix": found.per_token.prefix,
        "clip": found.per_token.clip,
        "log_ratio": found.per_token.log_ratio,
    }


def context_parallel_head(rank: int, head: Head, **keywords: Any) -> dict[str, Any]:
    rows = zigzag_rows(rank)
    batch = {name: value[rows] for name, value in without(head.batch, "cu_seqlens").items()}
    batch["cu_seqlens"] = head.batch["cu_seqlens"] // RANKS
    mine = replace(head, hidden=head.hidden[rows], labels=head.labels[rows], batch=batch)
    return fields_of(sweep(mine, cp_group=dist.group.WORLD, chunk_size=8, **keywords))


def refusals(batch: dict[str, Tensor]) -> list[str]:
    """Messages of calls that a group makes wrong; refused before any collective, so no rank is left waiting."""
    messages = []
    for changes in ({"loss_agg_mode": "token-mean"}, {"cu_seqlens": torch.tensor([0, 3, 28])}):
        changed = {**without(batch, "weights"), **changes}
        try:
            ctpo_loss(**changed, cp_group=dist.group.WORLD)
        except ValueError as error:
            messages.append(str(error))
    return messages
