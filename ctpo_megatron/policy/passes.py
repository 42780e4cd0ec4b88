"""Passes of the model over packed micro-batches: log-probs of its output, losses, and the reports of all ranks.

Rows that predict no response token are not evaluated.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from ctpo_kernels import linear_log_probs, vocab_parallel_log_probs
from ctpo_megatron.config import ObjectiveConfig
from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import (
    Denominators,
    LossStats,
    Objective,
    ObjectiveInputs,
    PolicyLossOutput,
    PolicyObjective,
    function_loss,
    linear_policy_loss,
    load_objective,
    merge,
    objective_from_config,
    policy_loss,
    supervised_loss,
)
from ctpo_megatron.policy import device
from ctpo_megatron.policy.context import ContextSplit, Targets, gather_rows
from ctpo_megatron.policy.device import DeviceMemory
from ctpo_megatron.policy.layers import packed_sequences
from ctpo_megatron.policy.minibatch import Anchor, MiniBatch
from ctpo_megatron.policy.model import BuiltModel
from ctpo_megatron.policy.parallel import Layout, gather_objects
from ctpo_megatron.policy.reports import RankReport

log = logging.getLogger(__name__)

Collected = dict[str, Any]


@dataclass(frozen=True)
class Predictions(ABC):
    """The output of the last pipeline stage for one micro-batch, and the log-probs of it.

    Log-probs are of softmax(logits / temperature): float32 `[n]` nats, 0 in rows that predict no response token.
    n: the rows that this context-parallel rank holds. Losses and statistics are this rank's share.
    """

    targets: Targets
    temperature: float
    model: BuiltModel
    output: Tensor

    @abstractmethod
    def _evaluate(self, return_entropy: bool = False) -> Any:
        """`[n]` log-probs, differentiable; with `return_entropy` a pair, entropies as well."""

    def log_probs(self) -> Tensor:
        """`[n]`, differentiable."""
        log_probs: Tensor = self._evaluate()
        return log_probs

    def log_probs_and_entropy(self) -> tuple[Tensor, Tensor]:
        """`[n]` each, differentiable; entropy in nats. The same bits as the log-probs that a loss uses."""
        log_probs, entropy = self._evaluate(return_entropy=True)
        return log_probs, entropy

    def _at_rows(self, values: Any) -> Any:
        """Values of `targets.rows`, or of their distinct pairs -> `[n]`, 0 elsewhere; of a pair each."""
        if isinstance(values, tuple):
            return tuple(map(self._at_rows, values))
        shared, count = self.targets.shared, self.targets.labels.numel()
        known = values if shared is None else shared.spread(values)
        return known.new_zeros(count).index_put((self.targets.rows,), known)

    def policy_loss(self, anchor: Anchor, objective: PolicyObjective, denominators: Denominators) -> PolicyLossOutput:
        """`objective.policy_loss` of the rows, differentiable in the model's output and in the output layer.

        Also returns the rows' log-probs, and the entropies if `targets.on_policy`.
        """
        targets, entropy = self.targets, None
        if objective.entropy_coef:
            log_probs, entropy = self.log_probs_and_entropy()
        else:
            log_probs = self.log_probs()
        joined, bonus, pieces_suffice = log_probs, None, objective.on_kernels and entropy is None
        if not pieces_suffice:
            joined, bonus = targets.split.join(log_probs), None if entropy is None else targets.split.join(entropy)
            targets = targets.of_whole_sequences()
        old_log_probs = anchor_of_rows(targets, anchor)
        output = policy_loss(
            joined,
            joined.detach() if old_log_probs is None else old_log_probs,
            objective=objective,
            denominators=denominators,
            cp_group=targets.split.group,
            entropy=bonus,
            turn=targets.turn,
            **targets.of_loss,
        )
        return self.with_rows(output if pieces_suffice else self.share(output), log_probs, entropy)

    def share(self, output: PolicyLossOutput) -> PolicyLossOutput:
        """This rank's share of a loss that every rank of the context-parallel group computes of whole sequences.

        Each differentiates it in its own log-probs, and the first reports it.
        """
        group = self.targets.split.group
        if group is None or group.rank() == 0:
            return output
        return replace(output, stats=output.stats.without_sums())

    def with_rows(self, output: PolicyLossOutput, log_probs: Tensor, entropy: Tensor | None = None) -> PolicyLossOutput:
        """Return the loss of the given `log_probs`, with them and, if requested, the entropies in the output.

        entropy: where it is known already.
        """
        if self.targets.on_policy and entropy is None:
            with torch.no_grad():
                entropy = self.log_probs_and_entropy()[1]
        kept = entropy.detach() if self.targets.on_policy and entropy is not None else None
        return replace(output, log_probs=log_probs.detach(), entropy=kept)


@dataclass(frozen=True)
class LogitsPredictions(Predictions):
    """From logits `[n, V_padded / tp]` of this rank's vocabulary shard."""

    def _evaluate(self, return_entropy: bool = False) -> Any:
        rows, shared = self.targets.rows, self.targets.shared
        found = vocab_parallel_log_probs(
            # A copy, so that the gradient may overwrite it.
            self.output[rows] if shared is None else gather_rows(self.output, shared.source),
            self.targets.labels[rows if shared is None else shared.token],
            mpu.get_tensor_model_parallel_group(),
            self.temperature,
            inplace_backward=True,
            vocab_size=self.model.spec.vocab_size,
            return_entropy=return_entropy,
        )
        return self._at_rows(found)


@dataclass(frozen=True)
class StreamingPredictions(Predictions):
    """From hidden states `[n, H]` (`[n / tp, H]` under sequence parallelism) and the output layer's weight.

    One sweep may add the gradient of the weight to Megatron's buffer itself. Megatron drops what autograd gives it of
    that weight from then on, in later micro-batches too, so all of an optimizer step have to do so: without shared
    prefixes.
    """

    def policy_loss(self, anchor: Anchor, objective: PolicyObjective, denominators: Denominators) -> PolicyLossOutput:
        targets = self.targets
        if not objective.on_kernels or targets.shared is not None:  # in one sweep the loss is of the output's rows
            return super().policy_loss(anchor, objective, denominators)
        return linear_policy_loss(
            self.output,
            self.model.output_weight,
            targets.labels,
            anchor_of_rows(targets, anchor),
            objective=objective,
            denominators=denominators,
            temperature=self.temperature,
            vocab_size=self.model.spec.vocab_size,
            tp_group=mpu.get_tensor_model_parallel_group(),
            cp_group=targets.split.group,
            sequence_parallel=self.model.config.sequence_parallel,
            chunk_size=self.model.head_chunk,
            rows=targets.rows,
            may_learn=targets.in_loss if objective.entropy_coef else targets.may_learn,
            accumulate_into_main_grad=torch.is_grad_enabled() and not self.model.shares_prefixes,
            gradient_scale=self.model.gradient_scale,
            entropy=targets.on_policy,
            **targets.of_loss,
        )

    def _evaluate(self, return_entropy: bool = False) -> Any:
        targets, shared = self.targets, self.targets.shared
        hidden, labels, parallel = self.output, targets.labels, self.model.config.sequence_parallel
        evaluated: dict[str, Any] = {"mask": targets.response_mask, "rows": targets.rows}
        if shared is not None:  # each distinct pair once
            hidden, labels = gather_rows(self._whole_hidden(), shared.source), labels[shared.token]
            parallel, evaluated = False, {}
        found = linear_log_probs(
            hidden,
            self.model.output_weight,
            labels,
            mpu.get_tensor_model_parallel_group(),
            parallel,
            self.temperature,
            chunk_size=self.model.head_chunk,
            vocab_size=self.model.spec.vocab_size,
            **evaluated,
            return_entropy=return_entropy,
        )
        return found if shared is None else self._at_rows(found)

    def _whole_hidden(self) -> Tensor:
        """`[n, H]`; the gradient of the head is of all tensor-parallel ranks already."""
        hidden = self.output.reshape(-1, self.output.shape[-1])
        if not self.model.config.sequence_parallel:
            return hidden
        gathered: Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return gathered


LossFunction = Callable[[Predictions, Denominators], PolicyLossOutput]
"""(predictions of a micro-batch, denominators of the whole optimizer step) -> the loss share of this micro-batch."""


def configured_loss(config: ObjectiveConfig) -> LossFunction:
    """Return the RL loss of a configuration: its preset with overrides, or the user's `objective.function`.

    Raises ExtensionError when that cannot be found or called; `extensions.activate` comes first.
    """
    objective = objective_from_config(config)
    if config.function is not None or not objective.on_kernels:
        log.info(
            "objective: %s, given log-probs of the model; the one-sweep head does not support it, so the output layer "
            "is computed a second time in the backward pass (policy.head=streaming)",
            config.function or config.preset,
        )
    if config.function is None:
        return policy_gradient(objective, config.anchor)
    return function_gradient(load_objective(config.function), objective, config.anchor)


def policy_gradient(objective: PolicyObjective, anchor: Anchor) -> LossFunction:
    """Return the RL loss. proximal: ratios against the trainer's old log-probs; behaviour: against the sampler's.

    decoupled: as proximal; the weights of `apply_correction` account for the difference between the two. In a
    micro-batch that is `on_policy`, the old log-probs are the log-probs of the pass itself.
    """
    return lambda predictions, denominators: predictions.policy_loss(anchor, objective, denominators)


def function_gradient(function: Objective, objective: PolicyObjective, anchor: Anchor) -> LossFunction:
    """Return the RL loss by a user's function; `objective` says how its token losses are aggregated."""

    def loss(predictions: Predictions, denominators: Denominators) -> PolicyLossOutput:
        log_probs, entropy = predictions.log_probs_and_entropy()
        entropy, split = entropy.detach(), predictions.targets.split
        targets, joined = predictions.targets.of_whole_sequences(), split.join(log_probs)
        old_log_probs = anchor_of_rows(targets, anchor)
        inputs = ObjectiveInputs(
            log_probs=joined,
            old_log_probs=joined.detach() if old_log_probs is None else old_log_probs,
            rollout_log_probs=targets.rollout_log_probs,
            denominators=denominators,
            turn=targets.turn,
            entropy=split.gather(entropy),
            weight_version=targets.weight_version,
            version=targets.batch.version,
            group=targets.group,
            **targets.of_loss,
        )
        return predictions.with_rows(predictions.share(function_loss(function, inputs, objective)), log_probs, entropy)

    return loss


def anchor_of_rows(targets: Targets, anchor: Anchor) -> Tensor | None:
    """Return the denominator of the ratios; None: the log-probs of the pass itself."""
    found = targets.rollout_log_probs if anchor == "behaviour" else targets.old_log_probs
    if found is None and not targets.on_policy:
        raise ValueError(f"the {anchor} anchor needs Trainer.compute_old_log_probs() before Trainer.update()")
    return found


def supervised() -> LossFunction:
    """Negative log-likelihood of the assistant tokens of SFT."""

    def loss(predictions: Predictions, denominators: Denominators) -> PolicyLossOutput:
        log_probs = predictions.log_probs()
        output = supervised_loss(log_probs, predictions.targets.loss_mask, denominators)
        return predictions.with_rows(output, log_probs)

    return loss


MicroLoss = Callable[[Predictions], tuple[Tensor, Collected]]
"""Predictions of a micro-batch -> (loss to add up, what to keep of it)."""


class Passes:
    """Forward and backward passes at the temperature of the rollouts; every method is collective."""

    def __init__(self, model: BuiltModel, layout: Layout, memory: DeviceMemory, temperature: float) -> None:
        self._model = model
        self._layout = layout
        self.memory = memory
        self._temperature = temperature

    def _run(
        self, micro_batches: Sequence[PackedBatch], loss: MicroLoss, *, temperature: float, forward_only: bool
    ) -> list[Collected]:
        """Run one forward (and backward) pass per micro-batch.

        Gradients are summed, not averaged, over micro-batches and data-parallel ranks.
        Returns what `loss` kept, one entry per micro-batch, on the last pipeline stage; an empty list on the others.
        """
        model = self._model

        def forward_step(batches: Iterator[PackedBatch], module: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            split = ContextSplit.of(batch.on_host.cu_seqlens).to(batch.cu_seqlens.device)
            if model.replays is not None:
                model.replays.start(batch, split)
            packed = packed_sequences(batch, split, whole_attention=model.whole_attention)
            output = module(
                input_ids=packed.take(batch.token_ids)[None],
                position_ids=packed.take(batch.position_ids)[None],
                attention_mask=None,
                packed_seq_params=packed,
                **model.output_options,
            )

            def loss_function(output: Tensor) -> tuple[Tensor, Tensor, Collected]:
                kind = StreamingPredictions if model.streaming else LogitsPredictions
                total, kept = loss(kind(Targets.of(batch, split), temperature, model, output[0]))
                # Megatron would divide the gradient by the token count; the loss is already divided, so any valid
                # integer serves.
                return total, torch.ones((), dtype=torch.int, device=total.device), kept

            return output, loss_function

        chunks = len(model.wrapped)
        with nullcontext() if model.replays is None else model.replays.schedule(training=not forward_only):
            collected: list[Collected] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(micro_batches) for _ in range(chunks)] if chunks > 1 else iter(micro_batches),
                model=list(model.wrapped),
                num_microbatches=len(micro_batches),
                seq_length=max(batch.num_rows for batch in micro_batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return collected

    def score(self, micro_batches: Sequence[PackedBatch], *, old: bool = False) -> None:
        """Store the log-probs of the current weights, without gradient. old: they are the old log-probs, too, and
        entropies are stored."""
        zero = torch.zeros((), device=self._layout.device)
        for micro in micro_batches:
            micro.on_policy = old

        def score(predictions: Predictions) -> tuple[Tensor, Collected]:
            return zero, collect(predictions.targets, *predictions.log_probs_and_entropy())

        # One schedule over all mini-batches: a pipeline fills and drains once.
        with self.memory.on_device(), torch.no_grad():
            kept = self._run(micro_batches, score, temperature=self._temperature, forward_only=True)
        keep_log_probs(micro_batches, kept)

    def accumulate(
        self, mini_batch: MiniBatch, loss_function: LossFunction, temperature: float | None = None
    ) -> list[Collected]:
        """Accumulate the gradients of all micro-batches and ranks in the gradient buffers; returns what the losses
        kept.

        In float16 they are `BuiltModel.gradient_scale` times as large. Called within `DeviceMemory.in_use`.
        temperature: used instead of the rollouts' temperature.
        """

        def loss(predictions: Predictions) -> tuple[Tensor, Collected]:
            output = loss_function(predictions, mini_batch.denominators)
            kept = collect(predictions.targets, output.log_probs, output.entropy)
            return output.loss, {"stats": output.stats} | kept

        self._model.zero_gradients()
        micro_batches = mini_batch.micro_batches
        temperature = temperature or self._temperature
        kept = self._run(micro_batches, loss, temperature=temperature, forward_only=False)
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
        report = RankReport(self._layout.dp_rank, mini_batch.work, device.peak_memory_mib())
        all_stats, reports, norms = zip(*gather_objects((own_stats, report, grad_norm)), strict=True)
        return merge([stats for stats in all_stats if stats is not None]), reports, norms


def collect(targets: Targets, log_probs: Tensor | None, entropy: Tensor | None) -> Collected:
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
