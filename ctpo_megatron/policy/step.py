"""Forward and backward passes over packed micro-batches, through megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from ctpo_megatron.data import PackedBatch
from ctpo_megatron.policy.logprob import vocab_parallel_entropy, vocab_parallel_log_probs
from ctpo_megatron.policy.model import BuiltModel

Collected = dict[str, Any]
MicroLoss = Callable[[torch.Tensor, PackedBatch], tuple[torch.Tensor, Collected]]
"""(log-probs [N] fp32 aligned with the predicted token, micro-batch) -> (loss to add up, what to keep of it)."""


def run_schedule(
    model: BuiltModel, batches: Sequence[PackedBatch], loss: MicroLoss, *, temperature: float, forward_only: bool
) -> list[Collected]:
    """One forward (and backward) pass per micro-batch; gradients are added up, not averaged, over them and over DP.

    Returns what `loss` kept, one entry a micro-batch, on the last pipeline stage; an empty list on the others.
    """
    collected: list[Collected] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss=loss, temperature=temperature, vocab_size=model.facts.vocab_size),
        data_iterator=iter(batches),
        model=[model.wrapped],
        num_microbatches=len(batches),
        seq_length=max(batch.num_tokens for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return collected


def _forward_step(
    batches: Iterator[PackedBatch],
    module: torch.nn.Module,
    *,
    loss: MicroLoss,
    temperature: float,
    vocab_size: int,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    batch = next(batches)
    longest = batch.max_seqlen
    output = module(
        input_ids=batch.token_ids[None],
        position_ids=batch.position_ids[None],
        attention_mask=None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )

    def loss_function(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Collected]:
        logp, entropy = token_log_probs(logits[0], batch, temperature=temperature, vocab_size=vocab_size)
        total, kept = loss(logp, batch)
        # The token count would divide the gradient; ours is already divided, so it only has to be a valid integer.
        return total, torch.ones((), dtype=torch.int, device=total.device), {**kept, **entropy}

    return output, loss_function


def token_log_probs(
    logits: torch.Tensor, batch: PackedBatch, *, temperature: float, vocab_size: int
) -> tuple[torch.Tensor, Collected]:
    """Log-probs [N] of the tokens the policy sampled (0 elsewhere), and the entropy sum when no gradient is wanted.

    logits: [N, V/tp]; row t - 1 predicts token t. Rows that predict no model token are not evaluated.
    """
    group = mpu.get_tensor_model_parallel_group()
    positions = batch.model_mask.nonzero().squeeze(1)
    rows = logits[positions - 1]
    labels = batch.token_ids[positions]
    values = vocab_parallel_log_probs(rows, labels, vocab_size=vocab_size, temperature=temperature, group=group)
    logp = torch.zeros(batch.num_tokens, dtype=torch.float32, device=logits.device).index_put((positions,), values)
    if torch.is_grad_enabled():
        return logp, {}
    entropy = vocab_parallel_entropy(rows, vocab_size=vocab_size, temperature=temperature, group=group)
    return logp, {"entropy_sum": float(entropy.sum()), "model_tokens": positions.numel()}
