"""The output of the last pipeline stage for one micro-batch, and the log-probs and losses computed from it.

Rows that predict no response token are not evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from megatron.core import parallel_state as mpu

from ctpo_kernels import linear_log_probs, vocab_parallel_log_probs
from ctpo_megatron.objective import Denominators, PolicyLossOutput, PolicyObjective, linear_policy_loss, policy_loss
from ctpo_megatron.policy.context import Targets


class Predictions(Protocol):
    """Log-probs are of softmax(logits / temperature): float32 `[n]` nats, 0 in rows that predict no response token.

    n: the rows that this context-parallel rank holds. Losses and statistics are this rank's share.
    """

    @property
    def targets(self) -> Targets:
        """The targets of the rows."""

    def log_probs(self) -> torch.Tensor:
        """`[n]`, differentiable."""

    def log_probs_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[n]` each, without gradients; entropy in nats. The same bits as the log-probs that a loss uses."""

    def policy_loss(
        self, old_log_probs: torch.Tensor | None, objective: PolicyObjective, denominators: Denominators
    ) -> PolicyLossOutput:
        """`objective.policy_loss` of the rows, differentiable in the model's output and in the output layer.

        Also returns the rows' log-probs, and the entropies if `targets.on_policy`. old_log_probs: None takes the
        log-probs themselves.
        """


@dataclass(frozen=True)
class LogitsPredictions:
    """From logits `[n, V_padded / tp]` of this rank's vocabulary shard."""

    logits: torch.Tensor
    targets: Targets
    temperature: float
    vocab_size: int

    def log_probs(self) -> torch.Tensor:
        rows = self.targets.rows
        values: Any = vocab_parallel_log_probs(
            self.logits[rows],  # a copy, so that the gradient may overwrite it
            self.targets.labels[rows],
            mpu.get_tensor_model_parallel_group(),
            self.temperature,
            inplace_backward=True,
            vocab_size=self.vocab_size,
        )
        return self._at(rows, values)

    def log_probs_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.targets.rows
        with torch.no_grad():
            values, entropy = vocab_parallel_log_probs(
                self.logits[rows],
                self.targets.labels[rows],
                mpu.get_tensor_model_parallel_group(),
                self.temperature,
                return_entropy=True,
                vocab_size=self.vocab_size,
            )
        return self._at(rows, values), self._at(rows, entropy)

    def policy_loss(
        self, old_log_probs: torch.Tensor | None, objective: PolicyObjective, denominators: Denominators
    ) -> PolicyLossOutput:
        return _loss_of(self, old_log_probs, objective, denominators)

    def _at(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.targets.labels.numel()).index_put((rows,), values)


@dataclass(frozen=True)
class StreamingPredictions:
    """From hidden states `[n, H]` (`[n / tp, H]` under sequence parallelism) and the output layer's weight."""

    hidden: torch.Tensor
    weight: torch.nn.Parameter
    targets: Targets
    temperature: float
    vocab_size: int
    sequence_parallel: bool
    chunk_size: int | None

    def log_probs(self) -> torch.Tensor:
        log_probs: torch.Tensor = self._linear_log_probs()
        return log_probs

    def log_probs_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            log_probs, entropy = self._linear_log_probs(return_entropy=True)
        return log_probs, entropy

    def policy_loss(
        self, old_log_probs: torch.Tensor | None, objective: PolicyObjective, denominators: Denominators
    ) -> PolicyLossOutput:
        if not objective.on_kernels:
            return _loss_of(self, old_log_probs, objective, denominators)
        targets = self.targets
        found = linear_policy_loss(
            self.hidden,
            self.weight,
            targets.labels,
            old_log_probs,
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
            may_learn=targets.may_learn,
            accumulate_into_main_grad=torch.is_grad_enabled(),
            entropy=targets.on_policy,
        )
        return PolicyLossOutput(found.loss, None, found.stats, found.log_probs, found.entropy)

    def _linear_log_probs(self, **options: bool) -> Any:
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


def with_rows(predictions: Predictions, output: PolicyLossOutput, log_probs: torch.Tensor) -> PolicyLossOutput:
    """The loss of the given `log_probs`, with them and, if requested, the entropies in the output."""
    entropy = predictions.log_probs_and_entropy()[1] if predictions.targets.on_policy else None
    return replace(output, log_probs=log_probs.detach(), entropy=entropy)


def _loss_of(
    predictions: Predictions, old_log_probs: torch.Tensor | None, objective: PolicyObjective, denominators: Denominators
) -> PolicyLossOutput:
    targets, log_probs = predictions.targets, predictions.log_probs()
    output = policy_loss(
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
    )
    return with_rows(predictions, output, log_probs)
