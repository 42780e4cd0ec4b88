"""What the last pipeline stage gave for one micro-batch, and the log-probs and losses that follow from it.

Row t - 1 of the model's output predicts token t. Batches and everything returned here are aligned with the token that
is predicted; rows that predict no model token are not evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state as mpu

from ctpo_kernels import linear_log_probs, vocab_parallel_log_probs
from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import Denominators, PolicyLossOutput, PolicyObjective, linear_policy_loss, policy_loss


class Predictions(Protocol):
    """Log-probs are of softmax(logits / temperature): float32 `[N]` nats, 0 at tokens the policy did not sample."""

    batch: PackedBatch

    def log_probs(self) -> torch.Tensor:
        """`[N]`, differentiable."""

    def log_probs_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N]` each, without gradients; entropy in nats. The same bits as the log-probs that a loss is taken of."""

    def policy_loss(
        self, anchor_logp: torch.Tensor, objective: PolicyObjective, denominators: Denominators
    ) -> PolicyLossOutput:
        """`objective.policy_loss` of the batch, differentiable in the model's output and in the output layer."""


@dataclass(frozen=True)
class LogitsPredictions:
    """From logits `[N, V_padded / tp]` of this rank's vocabulary shard."""

    logits: torch.Tensor
    batch: PackedBatch
    temperature: float
    vocab_size: int

    def log_probs(self) -> torch.Tensor:
        positions = self._positions()
        values = vocab_parallel_log_probs(
            self.logits[positions - 1],  # a copy, which the gradient may overwrite
            self.batch.token_ids[positions],
            mpu.get_tensor_model_parallel_group(),
            self.temperature,
            inplace_backward=True,
            vocab_size=self.vocab_size,
        )
        return self._at(positions, values)

    def log_probs_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        positions = self._positions()
        with torch.no_grad():
            values, entropy = vocab_parallel_log_probs(
                self.logits[positions - 1],
                self.batch.token_ids[positions],
                mpu.get_tensor_model_parallel_group(),
                self.temperature,
                return_entropy=True,
                vocab_size=self.vocab_size,
            )
        return self._at(positions, values), self._at(positions, entropy)

    def policy_loss(
        self, anchor_logp: torch.Tensor, objective: PolicyObjective, denominators: Denominators
    ) -> PolicyLossOutput:
        return policy_loss(
            self.log_probs(),
            anchor_logp,
            self.batch.advantages,
            self.batch.model_mask,
            objective,
            loss_mask=self.batch.loss_mask,
            cu_seqlens=self.batch.cu_seqlens,
            denominators=denominators,
        )

    def _positions(self) -> torch.Tensor:
        return self.batch.model_mask.nonzero().squeeze(1)

    def _at(self, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.batch.num_tokens).index_put((positions,), values)


@dataclass(frozen=True)
class StreamingPredictions:
    """From hidden states `[N, H]` (`[N / tp, H]` under sequence parallelism) and the output layer's weight."""

    hidden: torch.Tensor
    weight: torch.nn.Parameter
    batch: PackedBatch
    temperature: float
    vocab_size: int
    sequence_parallel: bool

    def log_probs(self) -> torch.Tensor:
        return self._linear_log_probs().roll(1)

    def log_probs_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            log_prob, entropy = self._linear_log_probs(return_entropy=True)
        return log_prob.roll(1), entropy.roll(1)

    def policy_loss(
        self, anchor_logp: torch.Tensor, objective: PolicyObjective, denominators: Denominators
    ) -> PolicyLossOutput:
        batch = self.batch
        found = linear_policy_loss(
            self.hidden,
            self.weight,
            _next(batch.token_ids),
            _next(anchor_logp),
            _next(batch.advantages),
            _next(batch.model_mask),
            objective,
            loss_mask=_next(batch.loss_mask),
            cu_seqlens=batch.cu_seqlens,
            denominators=denominators,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            tp_group=mpu.get_tensor_model_parallel_group(),
            sequence_parallel=self.sequence_parallel,
            accumulate_into_main_grad=torch.is_grad_enabled(),
        )
        return PolicyLossOutput(found.loss, None, found.stats)

    def _linear_log_probs(self, **options: bool) -> Any:
        return linear_log_probs(
            self.hidden,
            self.weight,
            _next(self.batch.token_ids),
            mpu.get_tensor_model_parallel_group(),
            self.sequence_parallel,
            self.temperature,
            vocab_size=self.vocab_size,
            mask=_next(self.batch.model_mask),
            **options,
        )


def _next(values: torch.Tensor) -> torch.Tensor:
    """`[N]` aligned with tokens -> aligned with the rows that predict them.

    The first token of a sequence is never a model token: what rolls into the row before it is masked.
    """
    return values.roll(-1)
