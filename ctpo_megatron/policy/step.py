"""Forward and backward passes over packed micro-batches, through megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from ctpo_megatron.data import PackedBatch
from ctpo_megatron.policy.context import ContextSplit, Targets
from ctpo_megatron.policy.layers import packed_sequences
from ctpo_megatron.policy.model import BuiltModel
from ctpo_megatron.policy.predictions import LogitsPredictions, Predictions, StreamingPredictions

Collected = dict[str, Any]
MicroLoss = Callable[[Predictions], tuple[torch.Tensor, Collected]]
"""Predictions of a micro-batch -> (loss to add up, what to keep of it)."""


def run_schedule(
    model: BuiltModel, batches: Sequence[PackedBatch], loss: MicroLoss, *, temperature: float, forward_only: bool
) -> list[Collected]:
    """One forward (and backward) pass per micro-batch; gradients are summed, not averaged, over micro-batches and DP.

    Returns what `loss` kept, one entry per micro-batch, on the last pipeline stage; an empty list on the others.
    """
    chunks = len(model.wrapped)
    collected: list[Collected] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, model=model, loss=loss, temperature=temperature),
        data_iterator=[iter(batches) for _ in range(chunks)] if chunks > 1 else iter(batches),
        model=list(model.wrapped),
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
    model: BuiltModel,
    loss: MicroLoss,
    temperature: float,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    batch = next(batches)
    split = ContextSplit.of(batch.on_host.cu_seqlens).to(batch.cu_seqlens.device)
    output = module(
        input_ids=split.take(batch.token_ids)[None],
        position_ids=split.take(batch.position_ids)[None],
        attention_mask=None,
        packed_seq_params=packed_sequences(batch, split),
        **model.output_options,
    )

    def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Collected]:
        total, kept = loss(_predictions(model, output[0], Targets.of(batch, split), temperature))
        # Megatron would divide the gradient by the token count; the loss is already divided, so any valid integer
        # serves.
        return total, torch.ones((), dtype=torch.int, device=total.device), kept

    return output, loss_function


def _predictions(model: BuiltModel, output: torch.Tensor, targets: Targets, temperature: float) -> Predictions:
    if not model.streaming:
        return LogitsPredictions(output, targets, temperature, model.spec.vocab_size)
    return StreamingPredictions(
        output,
        model.output_weight,
        targets,
        temperature,
        model.spec.vocab_size,
        model.config.sequence_parallel,
        model.head_chunk,
    )
