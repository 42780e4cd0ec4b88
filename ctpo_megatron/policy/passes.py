"""Passes of the model over packed micro-batches, through megatron's pipeline schedules; the reports of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import LossStats, merge
from ctpo_megatron.policy import device
from ctpo_megatron.policy.context import ContextSplit, Targets
from ctpo_megatron.policy.layers import packed_sequences
from ctpo_megatron.policy.memory import DeviceMemory
from ctpo_megatron.policy.minibatch import MiniBatch, all_micro_batches
from ctpo_megatron.policy.model import BuiltModel
from ctpo_megatron.policy.parallel import Layout, gather_objects
from ctpo_megatron.policy.predictions import LogitsPredictions, LossFunction, Predictions, StreamingPredictions
from ctpo_megatron.policy.reports import RankReport

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
    with nullcontext() if model.replays is None else model.replays.schedule(training=not forward_only):
        collected: list[Collected] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, model=model, loss=loss, temperature=temperature),
            data_iterator=[iter(batches) for _ in range(chunks)] if chunks > 1 else iter(batches),
            model=list(model.wrapped),
            num_microbatches=len(batches),
            seq_length=max(batch.num_rows for batch in batches),
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
    if model.replays is not None:
        model.replays.start(batch, split)
    packed = packed_sequences(batch, split, model.attention)
    output = module(
        input_ids=packed.take(batch.token_ids)[None],
        position_ids=packed.take(batch.position_ids)[None],
        attention_mask=None,
        packed_seq_params=packed,
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
        return LogitsPredictions(targets, temperature, model.spec.vocab_size, output)
    return StreamingPredictions(
        targets,
        temperature,
        model.spec.vocab_size,
        hidden=output,
        weight=model.output_weight,
        sequence_parallel=model.config.sequence_parallel,
        chunk_size=model.head_chunk,
        gradient_scale=model.gradient_scale,
        into_main_grad=not model.shares_prefixes,
    )


class Passes:
    """Forward and backward passes at the temperature of the rollouts; every method is collective."""

    def __init__(self, model: BuiltModel, layout: Layout, memory: DeviceMemory, temperature: float) -> None:
        self._model = model
        self._layout = layout
        self.memory = memory
        self._temperature = temperature
        self._attention_shapes: set[tuple[int, int]] = set()

    def fill_old_log_probs(self, mini_batches: Sequence[MiniBatch]) -> None:
        """Store the log-probs and entropies of the current weights in every micro-batch."""
        self.score(all_micro_batches(mini_batches), old=True)

    def score(self, micro_batches: Sequence[PackedBatch], *, old: bool = False) -> None:
        """Store the log-probs of the current weights, without gradient. old: they are the old log-probs, too, and
        entropies are stored."""
        zero = torch.zeros((), device=self._layout.device)
        for micro in micro_batches:
            micro.on_policy = old

        def score(predictions: Predictions) -> tuple[torch.Tensor, Collected]:
            return zero, collect(predictions.targets, *predictions.log_probs_and_entropy())

        # One schedule over all mini-batches: a pipeline fills and drains once.
        with self.memory.on_device(), torch.no_grad():
            kept = run_schedule(self._model, micro_batches, score, temperature=self._temperature, forward_only=True)
        keep_log_probs(micro_batches, kept)

    def accumulate(
        self, mini_batch: MiniBatch, loss_function: LossFunction, temperature: float | None = None
    ) -> list[Collected]:
        """Accumulate the gradients of all micro-batches and ranks in the gradient buffers; returns what the losses
        kept.

        In float16 they are `BuiltModel.gradient_scale` times as large. Called within `DeviceMemory.in_use`.
        temperature: used instead of the rollouts' temperature.
        """

        def loss(predictions: Predictions) -> tuple[torch.Tensor, Collected]:
            output = loss_function(predictions, mini_batch.denominators)
            kept = collect(predictions.targets, output.log_probs, output.entropy)
            return output.loss, {"stats": output.stats} | kept

        self._model.zero_gradients()
        micro_batches = mini_batch.micro_batches
        temperature = temperature or self._temperature
        kept = run_schedule(self._model, micro_batches, loss, temperature=temperature, forward_only=False)
        keep_log_probs(micro_batches, kept)
        return kept

    def router_metrics(self) -> dict[str, float]:
        """See `RouterReplays.take_metrics`. Without a replay no expert is recorded; empty for a dense model."""
        if self._model.replays is not None:
            return self._model.replays.take_metrics()
        return {"mismatch/router_unrecorded": 1.0} if self._model.spec.num_experts else {}

    def over_ranks(
        self, kept: list[Collected], mini_batch: MiniBatch, grad_norm: float = 0.0
    ) -> tuple[LossStats, tuple[RankReport, ...], tuple[float, ...]]:
        """Statistics of the whole step, and report and gradient norm of every rank; the same on every rank.

        kept: the result of `accumulate`. grad_norm: on this rank.
        """
        own_stats = merge([collected["stats"] for collected in kept]).cpu() if self._layout.has_loss else None
        computed, count = mini_batch.work.computed_tokens, len(mini_batch.micro_batches)
        self._attention_shapes |= mini_batch.work.attention_shapes
        shapes = len(self._attention_shapes)
        distinct = mini_batch.work.distinct_tokens
        report = RankReport(self._layout.dp_rank, distinct, computed, count, device.peak_memory_mib(), shapes)
        all_stats, reports, norms = zip(*gather_objects((own_stats, report, grad_norm)), strict=True)
        return merge([stats for stats in all_stats if stats is not None]), reports, norms

    def logits(self, mini_batch: MiniBatch, count: int) -> list[torch.Tensor]:
        """Logits `[T, V]` (float32, on the CPU) of the `count` sequences of a mini-batch, on every rank."""
        nothing = torch.zeros((), device=self._layout.device)
        with self.memory.on_device(), torch.no_grad():
            kept = run_schedule(
                self._model,
                mini_batch.micro_batches,
                lambda predictions: (nothing, {"logits": predictions.logits.float().cpu()}),  # type: ignore[attr-defined]
                temperature=1.0,
                forward_only=True,
            )
        own: dict[tuple[int, int], torch.Tensor] = {}
        for micro, collected in zip(mini_batch.micro_batches, kept, strict=False):
            for number, tokens in micro.places():
                at: Any = tokens if micro.forest is None else torch.from_numpy(micro.forest.row[tokens])
                own[number, self._layout.tp_rank] = collected["logits"][at]
        shards: dict[tuple[int, int], torch.Tensor] = {}
        for part in gather_objects(own):
            shards |= part
        vocab_size, ranks = self._model.spec.vocab_size, range(self._layout.tp_size)
        return [torch.cat([shards[number, rank] for rank in ranks], dim=1)[:, :vocab_size] for number in range(count)]


def collect(targets: Targets, log_probs: torch.Tensor | None, entropy: torch.Tensor | None) -> Collected:
    """Results of a pass for the rows of this rank: `log_probs` `[N]`, aligned with the tokens, and `entropy`."""
    kept: Collected = {}
    if log_probs is not None:
        kept["log_probs"] = targets.per_token(log_probs)
    if entropy is not None:
        kept["entropy"] = targets.per_token(entropy)
    return kept


def keep_log_probs(micro_batches: Sequence[PackedBatch], kept: Sequence[Collected]) -> None:
    """Store in micro-batches what the last pass over them kept (nothing before the last pipeline stage).

    If they are `on_policy`, these are the old log-probs. The next pass has other weights.
    """
    for micro, collected in zip(micro_batches, kept, strict=False):
        micro.log_probs = collected.get("log_probs")
        if micro.on_policy:
            micro.old_log_probs, micro.entropy = micro.log_probs, collected["entropy"]
    for micro in micro_batches:
        micro.on_policy = False
