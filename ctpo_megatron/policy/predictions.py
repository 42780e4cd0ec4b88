"""The output of the last pipeline stage for one micro-batch, the log-probs of it, and the losses of an optimizer step.

Rows that predict no response token are not evaluated.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from ctpo_kernels import linear_log_probs, vocab_parallel_log_probs
from ctpo_megatron.config import ObjectiveConfig, TurnRatio
from ctpo_megatron.objective import (
    Denominators,
    Objective,
    ObjectiveInputs,
    PolicyLossOutput,
    PolicyObjective,
    function_loss,
    linear_policy_loss,
    load_objective,
    objective_from_config,
    policy_loss,
    supervised_loss,
)
from ctpo_megatron.policy.context import Targets
from ctpo_megatron.policy.nodes import gather_rows

log = logging.getLogger(__name__)

Anchor = Literal["proximal", "behaviour", "decoupled"]


@dataclass(frozen=True)
class Predictions(ABC):
    """Log-probs are of softmax(logits / temperature): float32 `[n]` nats, 0 in rows that predict no response token.

    n: the rows that this context-parallel rank holds. Losses and statistics are this rank's share.
    """

    targets: Targets
    temperature: float
    vocab_size: int

    @abstractmethod
    def log_probs(self) -> Tensor:
        """`[n]`, differentiable."""

    @abstractmethod
    def log_probs_and_entropy(self) -> tuple[Tensor, Tensor]:
        """`[n]` each, differentiable; entropy in nats. The same bits as the log-probs that a loss uses."""

    def at_rows(self, values: Tensor) -> Tensor:
        """Values of `targets.rows`, or of their distinct pairs -> `[n]`, 0 elsewhere."""
        shared, count = self.targets.shared, self.targets.labels.numel()
        known = values if shared is None else shared.spread(values)
        return known.new_zeros(count).index_put((self.targets.rows,), known)

    def policy_loss(self, anchor: Anchor, objective: PolicyObjective, denominators: Denominators) -> PolicyLossOutput:
        """`objective.policy_loss` of the rows, differentiable in the model's output and in the output layer.

        Also returns the rows' log-probs, and the entropies if `targets.on_policy`.
        """
        own, entropy = self.targets, None
        if objective.entropy_coef:
            log_probs, entropy = self.log_probs_and_entropy()
        else:
            log_probs = self.log_probs()
        if objective.on_kernels and entropy is None:  # for which pieces of sequences suffice
            return self.with_rows(_loss_of(own, log_probs, None, anchor, objective, denominators), log_probs)
        joined, bonus = own.split.join(log_probs), None if entropy is None else own.split.join(entropy)
        output = _loss_of(own.of_whole_sequences(), joined, bonus, anchor, objective, denominators)
        return self.with_rows(self.share(output), log_probs, entropy)

    def share(self, output: PolicyLossOutput) -> PolicyLossOutput:
        """This rank's share of a loss that every rank of the context-parallel group computes of whole sequences.

        Each differentiates it in its own log-probs, and the first reports it.
        """
        group = self.targets.split.group
        if group is None or group.rank() == 0:
            return output
        return replace(output, stats=output.stats.without_sums())

    def with_rows(self, output: PolicyLossOutput, log_probs: Tensor, entropy: Tensor | None = None) -> PolicyLossOutput:
        """The loss of the given `log_probs`, with them and, if requested, the entropies in the output.

        entropy: where it is known already.
        """
        if self.targets.on_policy and entropy is None:
            with torch.no_grad():
                entropy = self.log_probs_and_entropy()[1]
        kept = entropy.detach() if self.targets.on_policy and entropy is not None else None
        return replace(output, log_probs=log_probs.detach(), entropy=kept)


def _loss_of(
    targets: Targets,
    log_probs: Tensor,
    entropy: Tensor | None,
    anchor: Anchor,
    objective: PolicyObjective,
    denominators: Denominators,
) -> PolicyLossOutput:
    """`objective.policy_loss` of log-probs and entropies that are aligned with the rows of `targets`."""
    old_log_probs = anchor_of_rows(targets, anchor)
    return policy_loss(
        log_probs,
        log_probs.detach() if old_log_probs is None else old_log_probs,
        targets.advantages,
        targets.response_mask,
        objective,
        loss_mask=targets.loss_mask,
        weights=targets.weights,
        cu_seqlens=targets.cu_seqlens,
        denominators=denominators,
        cp_group=targets.split.group,
        entropy=entropy,
        turn=targets.turn,
    )


@dataclass(frozen=True)
class LogitsPredictions(Predictions):
    """From logits `[n, V_padded / tp]` of this rank's vocabulary shard."""

    logits: Tensor

    def log_probs(self) -> Tensor:
        return self.at_rows(self._vocab_parallel())

    def log_probs_and_entropy(self) -> tuple[Tensor, Tensor]:
        values, entropy = self._vocab_parallel(return_entropy=True)
        return self.at_rows(values), self.at_rows(entropy)

    def _vocab_parallel(self, **options: bool) -> Any:
        rows, shared = self.targets.rows, self.targets.shared
        return vocab_parallel_log_probs(
            # A copy, so that the gradient may overwrite it.
            self.logits[rows] if shared is None else gather_rows(self.logits, shared.source),
            self.targets.labels[rows if shared is None else shared.token],
            mpu.get_tensor_model_parallel_group(),
            self.temperature,
            inplace_backward=True,
            vocab_size=self.vocab_size,
            **options,
        )


@dataclass(frozen=True)
class StreamingPredictions(Predictions):
    """From hidden states `[n, H]` (`[n / tp, H]` under sequence parallelism) and the output layer's weight.

    gradient_scale: what the loss is multiplied by before the backward pass. into_main_grad: one sweep may add the
    gradient of the weight to Megatron's buffer itself. Megatron drops what autograd gives it of that weight from then
    on, in later micro-batches too, so all of an optimizer step have to do so.
    """

    hidden: Tensor
    weight: torch.nn.Parameter
    sequence_parallel: bool
    chunk_size: int | None
    gradient_scale: float
    into_main_grad: bool = True

    def log_probs(self) -> Tensor:
        log_probs: Tensor = self._linear_log_probs()
        return log_probs

    def log_probs_and_entropy(self) -> tuple[Tensor, Tensor]:
        log_probs, entropy = self._linear_log_probs(return_entropy=True)
        return log_probs, entropy

    def policy_loss(self, anchor: Anchor, objective: PolicyObjective, denominators: Denominators) -> PolicyLossOutput:
        targets = self.targets
        if not objective.on_kernels or targets.shared is not None:  # in one sweep the loss is of the output's rows
            return super().policy_loss(anchor, objective, denominators)
        return linear_policy_loss(
            self.hidden,
            self.weight,
            targets.labels,
            anchor_of_rows(targets, anchor),
            targets.advantages,
            targets.response_mask,
            objective,
            loss_mask=targets.loss_mask,
            weights=targets.weights,
            cu_seqlens=targets.cu_seqlens,
            denominators=denominators,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            tp_group=mpu.get_tensor_model_parallel_group(),
            cp_group=targets.split.group,
            sequence_parallel=self.sequence_parallel,
            chunk_size=self.chunk_size,
            rows=targets.rows,
            may_learn=targets.in_loss if objective.entropy_coef else targets.may_learn,
            accumulate_into_main_grad=torch.is_grad_enabled() and self.into_main_grad,
            gradient_scale=self.gradient_scale,
            entropy=targets.on_policy,
        )

    def _linear_log_probs(self, **options: Any) -> Any:
        if (shared := self.targets.shared) is not None:
            found = linear_log_probs(
                gather_rows(self._whole_hidden(), shared.source),
                self.weight,
                self.targets.labels[shared.token],
                mpu.get_tensor_model_parallel_group(),
                False,
                self.temperature,
                chunk_size=self.chunk_size,
                vocab_size=self.vocab_size,
                **options,
            )
            return tuple(map(self.at_rows, found)) if isinstance(found, tuple) else self.at_rows(found)
        return linear_log_probs(
            self.hidden,
            self.weight,
            self.targets.labels,
            mpu.get_tensor_model_parallel_group(),
            self.sequence_parallel,
            self.temperature,
            chunk_size=self.chunk_size,
            vocab_size=self.vocab_size,
            mask=self.targets.response_mask,
            rows=self.targets.rows,
            **options,
        )

    def _whole_hidden(self) -> Tensor:
        """`[n, H]`; the gradient of the head is of all tensor-parallel ranks already."""
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        if not self.sequence_parallel:
            return hidden
        gathered: Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return gathered


LossFunction = Callable[[Predictions, Denominators], PolicyLossOutput]
"""(predictions of a micro-batch, denominators of the whole optimizer step) -> the loss share of this micro-batch."""


def configured_loss(config: ObjectiveConfig) -> LossFunction:
    """The RL loss of a configuration: its preset with overrides, or the user's `objective.function`.

    Raises ExtensionError when that cannot be found or called; `extensions.activate` comes first.
    """
    objective = objective_from_config(config)
    if config.by_turn:
        how = _TURN_RATIOS[objective.turn_ratio] if config.function is None else f"as {config.function} has it"
        log.info("objective: credit by turn, %s", how)
    if config.function is not None or not objective.on_kernels:
        log.info(
            "objective: %s, given log-probs of the model; the one-sweep head does not support it, so the output layer "
            "is computed a second time in the backward pass (policy.head=streaming)",
            config.function or config.preset,
        )
    if config.function is None:
        return policy_gradient(objective, config.anchor)
    return function_gradient(load_objective(config.function), objective, config.anchor)


_TURN_RATIOS: Mapping[TurnRatio, str] = {
    "prefix": "with the ratio of each token (turn_ratio: prefix); the ratio of a token or of a prefix leaves its "
    "gradient biased",
    "turn-end": "each reward with the ratio of the prefix up to the end of its turn (turn_ratio: turn-end); without "
    "clipping its gradient is unbiased",
}


def policy_gradient(objective: PolicyObjective, anchor: Anchor) -> LossFunction:
    """The RL loss. proximal: ratios against the trainer's old log-probs; behaviour: against the sampler's.

    decoupled: as proximal; the weights of `apply_correction` account for the difference between the two. In a
    micro-batch that is `on_policy`, the old log-probs are the log-probs of the pass itself.
    """

    def loss(predictions: Predictions, denominators: Denominators) -> PolicyLossOutput:
        return predictions.policy_loss(anchor, objective, denominators)

    return loss


def function_gradient(function: Objective, objective: PolicyObjective, anchor: Anchor) -> LossFunction:
    """The RL loss by a user's function; `objective` says how its token losses are aggregated."""

    def loss(predictions: Predictions, denominators: Denominators) -> PolicyLossOutput:
        log_probs, entropy = predictions.log_probs_and_entropy()
        entropy, split = entropy.detach(), predictions.targets.split
        targets, joined = predictions.targets.of_whole_sequences(), split.join(log_probs)
        old_log_probs = anchor_of_rows(targets, anchor)
        inputs = ObjectiveInputs(
            log_probs=joined,
            old_log_probs=joined.detach() if old_log_probs is None else old_log_probs,
            rollout_log_probs=targets.rollout_log_probs,
            advantages=targets.advantages,
            response_mask=targets.response_mask,
            loss_mask=targets.loss_mask,
            weights=targets.weights,
            cu_seqlens=targets.cu_seqlens,
            denominators=denominators,
            turn=targets.turn,
            entropy=split.gather(entropy),
            weight_version=targets.weight_version,
            version=targets.batch.version,
            group=targets.group,
        )
        return predictions.with_rows(predictions.share(function_loss(function, inputs, objective)), log_probs, entropy)

    return loss


def anchor_of_rows(targets: Targets, anchor: Anchor) -> Tensor | None:
    """The denominator of the ratios; None: the log-probs of the pass itself."""
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
