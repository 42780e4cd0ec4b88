"""The policy: weights in, old log-probs, optimizer updates, weights out, checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer

from ctpo_megatron.config import OptimizerConfig, PolicyConfig, read_spec
from ctpo_megatron.config.schema import CheckpointConfig
from ctpo_megatron.data import TokenSequence, Trajectory
from ctpo_megatron.models import ModelFamily
from ctpo_megatron.objective import LossStats, PolicyObjective, merge, summarize
from ctpo_megatron.policy import checkpoint, device, hf
from ctpo_megatron.policy.exchange import share_sizes
from ctpo_megatron.policy.hf_directory import write_directory
from ctpo_megatron.policy.losses import Anchor, LossFunction
from ctpo_megatron.policy.minibatch import MiniBatch, checked_sequences, make_mini_batches
from ctpo_megatron.policy.model import build_model, gather_gradient_shards, resolve_layer_spec
from ctpo_megatron.policy.offload import Offload
from ctpo_megatron.policy.optimizer import apply_gradients, build_optimizer, gradient_norm, learning_rate
from ctpo_megatron.policy.parallel import Layout, gather_objects, gather_on_rank_zero
from ctpo_megatron.policy.predictions import Predictions
from ctpo_megatron.policy.reports import (
    Clock,
    Diagnostics,
    Update,
    diagnostics_of,
    summarize_updates,
)
from ctpo_megatron.policy.start import BatchStart, collect, keep_log_probs, start_metrics
from ctpo_megatron.policy.step import Collected, run_schedule
from ctpo_megatron.policy.workload import Cost, RankReport

log = logging.getLogger(__name__)


class Trainer:
    """A Megatron-Core language model under training; every method is collective over all ranks.

    The architecture and the weights come from the Hugging Face directory `model_path`. Log-probs are those of
    softmax(logits / temperature), the distribution that rollouts are sampled from. family: the user's, or None.
    claim: called on every rank before anything is computed or taken back to the device, which others may use meanwhile.
    """

    def __init__(
        self,
        config: PolicyConfig,
        layout: Layout,
        model_path: Path,
        *,
        temperature: float,
        family: ModelFamily | None = None,
        claim: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._claim = claim
        self.layout = layout
        self.temperature = temperature
        self.source = model_path
        self.spec = read_spec(model_path, family)
        with device.scope():
            self._model = build_model(self.spec, config, layout.device)
            hf.load(self._model, model_path, layout)
        self._offload = Offload(config, self._model)
        self._optimizer: ChainedOptimizer | None = None
        self._bad_steps = 0  # in a row
        self._writer = checkpoint.Writer(layout, config.timeout_minutes * 60)

    def release(self) -> None:
        """Move what `policy.offload` names to host memory. Other methods move it back when they are called."""
        with device.scope():
            self._offload.release(self._optimizer)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._claim()
        with device.scope():
            self._offload.reclaim()
            yield

    @contextmanager
    def _complete_weights(self) -> Iterator[None]:
        """At work, with every parameter complete for readers on any stream.

        The gather of `overlap_param_gather` is awaited by the current stream alone, and vLLM's NCCL producer reads on
        streams of its own. The same holds for the copies of `Offload.reclaim`.
        """
        with self._at_work():
            self._model.finish_param_gather()
            device.synchronize()
            yield

    def use_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """Start a phase of training: AdamW with fresh state and a schedule over `total_steps` optimizer steps.

        Weight decay is on matrices and embeddings, on norms and biases only with `weight_decay_of: all`.
        """
        with self._at_work():
            self._optimizer, self._scheduler = build_optimizer(self._model, self.config, config, total_steps)
            self._total_steps, self._decayed = total_steps, config.weight_decay_of

    def mini_batches(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[float] | None,
        size: int,
        *,
        skip_zero_advantage: bool = False,
    ) -> list[MiniBatch]:
        """Optimizer steps of `size` trajectories each, in order, of trajectories that every rank has.

        See `checked_sequences` and `make_mini_batches`.
        """
        sequences = checked_sequences(trajectories, advantages, self.spec.vocab_size)
        return self._mini_batches(sequences, advantages, size, skip_zero_advantage=skip_zero_advantage)

    def share_out(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[float],
        size: int,
        version: int | None = None,
        *,
        skip_zero_advantage: bool = False,
    ) -> list[MiniBatch]:
        """`mini_batches` of trajectories that only rank zero has; the others pass none and get what they train on.

        version: of the current weights, with which tokens of other versions are not compared.
        """
        checked = self.layout.keep_on_rank_zero(
            lambda: checked_sequences(trajectories, advantages, self.spec.vocab_size, version)
        )
        sequences, advantages = share_sizes(checked or [], advantages, self.layout)
        skip = {"skip_zero_advantage": skip_zero_advantage}
        return self._mini_batches(sequences, advantages, size, from_rank_zero=True, **skip)

    def _mini_batches(
        self,
        sequences: Sequence[TokenSequence],
        advantages: Sequence[float] | None,
        size: int,
        **options: bool,
    ) -> list[MiniBatch]:
        return make_mini_batches(
            sequences,
            advantages,
            size=size,
            **options,
            config=self.config,
            layout=self.layout,
            spec=self.spec,
            padded_attention=resolve_layer_spec(self.config) == "local",
        )

    def begin(self, mini_batches: Sequence[MiniBatch], start: BatchStart) -> dict[str, float]:
        """The old log-probs that need a pass of their own; the others are left to the first update.

        Returns what `start` tells if it has all of them by now, and how much was computed.
        """
        ahead = start.ahead(mini_batches)
        if ahead:
            self._fill_old_log_probs(ahead)
        found = {
            "tokens/old_log_probs": float(sum(mini.work.trained_tokens for mini in ahead)),
            "tokens/old_log_probs_tflop": sum(mini.work.trained_flops for mini in ahead) / 1e12,
        }
        if len(ahead) == len(mini_batches):
            return found | start.metrics(mini_batches)
        for micro in mini_batches[0].micro_batches:
            micro.on_policy = True
        return found

    def compute_old_log_probs(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """Fill `old_log_probs` with the log-probs of the current weights, in the layout that training will use.

        Returns `start_metrics`.
        """
        self._fill_old_log_probs(mini_batches)
        return start_metrics(mini_batches, self.layout)

    def _fill_old_log_probs(self, mini_batches: Sequence[MiniBatch]) -> None:
        micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
        zero = torch.zeros((), device=self.layout.device)

        def score(predictions: Predictions) -> tuple[torch.Tensor, Collected]:
            return zero, collect(predictions.targets, *predictions.log_probs_and_entropy())

        with self._at_work(), torch.no_grad():
            kept = run_schedule(self._model, micro_batches, score, temperature=self.temperature, forward_only=True)
        for micro in micro_batches:
            micro.on_policy = True
        keep_log_probs(micro_batches, kept)

    def token_diagnostics(
        self, mini_batch: MiniBatch, objective: PolicyObjective, anchor: Anchor = "proximal"
    ) -> Diagnostics:
        """How far each trajectory of a mini-batch was from the anchor in the latest pass over it: that of its update.

        Place in the step -> `advantage`, and `log_ratio`, `clip_low`, `clip_high`, arrays `[T]` in nats; on rank zero.
        """
        mine: Diagnostics = {}
        for micro in mini_batch.micro_batches if self.layout.reports else []:
            mine |= diagnostics_of(micro, objective, anchor)
        parts = gather_on_rank_zero(mine) or []
        return {place: fields for part in parts for place, fields in part.items()}

    def update_all(
        self,
        mini_batches: Sequence[MiniBatch],
        loss_function: LossFunction,
        *,
        planned: int,
        start: BatchStart | None = None,
    ) -> dict[str, float]:
        """One optimizer step for each mini-batch; returns the metrics of all.

        planned: steps of a whole batch. The schedule of the learning rate goes on over those that this one lacks.
        start: as `begin` got it; what that left open follows before the first optimizer step, and may stop it.
        """
        ahead = mini_batches if start is None else start.ahead(mini_batches)
        first, *rest = mini_batches
        look = partial(start.metrics, [first, *ahead]) if start and len(ahead) < len(mini_batches) else None
        updates = [self.update(first, loss_function, look=look), *(self.update(mini, loss_function) for mini in rest)]
        if missing := planned - len(updates):
            self._scheduler.step(increment=missing)
        return summarize_updates(updates)

    def update(
        self,
        mini_batch: MiniBatch,
        loss_function: LossFunction,
        *,
        temperature: float | None = None,
        look: Callable[[], dict[str, float]] | None = None,
    ) -> Update:
        """One optimizer step; `temperature` replaces the rollouts' (a supervised loss wants 1).

        A step whose loss or gradient norm is not finite on any rank changes neither weights nor optimizer state; the
        schedule goes on. Raises FloatingPointError at the last of `policy.max_bad_steps` such steps in a row.
        look: called when the gradient is there and nothing has changed; gives metrics, and may raise on every rank.
        """
        if (optimizer := self._optimizer) is None:
            raise RuntimeError("use_optimizer comes before update")
        clock = Clock(mini_batch.work.packing_s)
        with self._at_work():
            optimizer.zero_grad()
            with clock.busy():
                kept = self._accumulate(mini_batch, loss_function, temperature or self.temperature)
                grad_norm = gradient_norm(optimizer)
            seen = look() if look else {}
            stats, ranks, norms = self._over_ranks(kept, mini_batch, grad_norm)
            rate = learning_rate(optimizer)
            losses = {name: value for name, value in summarize(stats).items() if name.endswith("loss")}
            if bad := not all(map(math.isfinite, [*losses.values(), *norms])):
                self._skip(optimizer, f"loss {losses}, gradient norm {grad_norm}")
            else:
                self._bad_steps = 0
                with clock.busy():
                    apply_gradients(optimizer, grad_norm)
            self._scheduler.step(increment=1)
        cost = Cost(mini_batch.work, *clock.read(), ranks)
        return Update(stats, grad_norm, rate, cost, bad, seen)

    def _skip(self, optimizer: ChainedOptimizer, found: str) -> None:
        optimizer.zero_grad()
        self._model.zero_gradients()
        self._bad_steps += 1
        limit = self.config.max_bad_steps
        if self._bad_steps >= limit:
            raise FloatingPointError(
                f"an optimizer step is not finite ({found}), as {limit} in a row now (policy.max_bad_steps)"
            )
        log.warning("optimizer step skipped: not finite (%s); %d in a row now", found, self._bad_steps)

    def gradients(
        self, mini_batch: MiniBatch, loss_function: LossFunction
    ) -> tuple[LossStats, Iterator[tuple[str, torch.Tensor]]]:
        """Statistics of a mini-batch and (Hugging Face name, full float32 gradient); iterate to the end on every rank.

        Nothing is updated. The gradients are those that `update` would hand to its optimizer.
        """
        with self._at_work():
            kept = self._accumulate(mini_batch, loss_function, self.temperature)
            stats, *_ = self._over_ranks(kept, mini_batch)
            if self.config.use_distributed_optimizer:
                gather_gradient_shards(self._model)
        return stats, hf.export(self._model, self.layout, value=_main_gradient)

    def _accumulate(self, mini_batch: MiniBatch, loss_function: LossFunction, temperature: float) -> list[Collected]:
        """Gradients of all micro-batches and ranks, added up in the gradient buffers; what the losses kept."""

        def loss(predictions: Predictions) -> tuple[torch.Tensor, Collected]:
            output = loss_function(predictions, mini_batch.denominators)
            kept = collect(predictions.targets, output.log_probs, output.entropy)
            return output.loss, {"stats": output.stats} | kept

        self._model.zero_gradients()
        micro_batches = mini_batch.micro_batches
        kept = run_schedule(self._model, micro_batches, loss, temperature=temperature, forward_only=False)
        keep_log_probs(micro_batches, kept)
        return kept

    def _over_ranks(
        self, kept: list[Collected], mini_batch: MiniBatch, grad_norm: float = 0.0
    ) -> tuple[LossStats, tuple[RankReport, ...], tuple[float, ...]]:
        """Statistics of the whole step, and report and gradient norm of every rank; the same on every rank."""
        mine = merge([found["stats"] for found in kept]).cpu() if self.layout.has_loss else None
        computed, count = mini_batch.work.computed_tokens, len(mini_batch.micro_batches)
        report = RankReport(self.layout.dp_rank, computed, count, device.peak_memory_mib())
        found, reports, norms = zip(*gather_objects((mine, report, grad_norm)), strict=True)
        return merge([stats for stats in found if stats is not None]), reports, norms

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of the whole model, one at a time, on every rank; iterate to the end."""
        with self._complete_weights():
            yield from hf.export(self._model, self.layout)

    def own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of `weights` that this rank is to send: each is of one rank. Collective; iterate to the end."""
        with self._complete_weights():
            yield from hf.export_share(self._model, self.layout)

    def own_weight_shapes(self) -> hf.Declared:
        """Name, shape and dtype of `own_weights`, in their order; not collective."""
        return hf.declare_share(self._model, self.layout)

    def weight_shapes(self) -> hf.Declared:
        """Name, shape and dtype of all `weights`, in their order, on every rank. Collective; no weight is moved."""
        return hf.declare(self._model, self.layout)

    def export(self, directory: Path, chat_template: str | None = None) -> None:
        """Write a Hugging Face model directory: weights, and configuration and tokenizer of the source model.

        chat_template: Jinja text in the place of the source model's.
        """
        write_directory(self.weights(), self.source, directory, self.layout, chat_template=chat_template)

    def save(
        self,
        directory: Path,
        step: int,
        run_state: dict[str, Any],
        config: CheckpointConfig | None = None,
        score: float | None = None,
        attached: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Path:
        """Checkpoint weights, optimizer, schedule, random streams and the driver's state; see `checkpoint.Writer`."""
        with self._complete_weights():
            settings = config or CheckpointConfig()
            return self._writer.save(directory, step, self._train_state(), run_state, settings, score, attached)

    def finish_save(self, *, wait: bool = True) -> None:
        """Complete an asynchronous save; without `wait`, only if it is done. See `checkpoint.Writer.finish`."""
        with device.scope():
            self._writer.finish(wait=wait)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint and return the driver's state in it; see `checkpoint.load`."""
        with self._at_work():
            return checkpoint.load(path, self.layout, self._train_state())

    def set_scheduler_step(self, fraction: float) -> None:
        """Put the schedule of the learning rate where `fraction` of its optimizer steps are done.

        After `load` it stands at as many as the checkpoint's run had made, of which this run may make more or fewer.
        """
        steps = round(fraction * self._total_steps)
        if steps != self._scheduler.num_steps:
            log.warning(
                "the schedule goes on at optimizer step %d of %d, where the checkpoint's run had made %d",
                steps,
                self._total_steps,
                self._scheduler.num_steps,
            )
            self._scheduler.num_steps = steps
            self._scheduler.step(increment=0)

    def load_weights(self, path: Path) -> dict[str, Any]:
        """Restore the weights of a checkpoint, no optimizer; returns the driver's state in it."""
        with self._at_work():
            return checkpoint.load_weights(path, self.layout, self._model)

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits `[T, V]` (float32, on the CPU) of each sequence of two or more token ids, on every rank.

        For short sequences: all logits pass through every rank. Needs `policy.head: logits` and no context
        parallelism, and a sequence for each replica; raises ValueError otherwise.
        """
        if self.config.head != "logits" or self.layout.cp_size > 1:
            raise ValueError("logits can be asked for with policy.head=logits and without context parallelism only")
        trajectories = []
        for number, ids in enumerate(sequences):
            trajectory = Trajectory("logits", number, seed=0)
            trajectory.append_context(list(ids), turn=0)
            trajectories.append(trajectory)
        (mini_batch,) = self.mini_batches(trajectories, None, len(trajectories))
        nothing = torch.zeros((), device=self.layout.device)
        with self._at_work(), torch.no_grad():
            kept = run_schedule(
                self._model,
                mini_batch.micro_batches,
                lambda predictions: (nothing, {"logits": predictions.logits.float().cpu()}),  # type: ignore[attr-defined]
                temperature=1.0,
                forward_only=True,
            )
        mine = {
            (number, self.layout.tp_rank): found["logits"][place]
            for micro, found in zip(mini_batch.micro_batches, kept, strict=False)
            for number, place in micro.places()
        }
        shards = {key: value for part in gather_objects(mine) for key, value in part.items()}
        return [
            torch.cat([shards[number, rank] for rank in range(self.layout.tp_size)], dim=1)[:, : self.spec.vocab_size]
            for number in range(len(sequences))
        ]

    def _train_state(self) -> checkpoint.TrainState:
        settings = {
            "policy.dtype": self.config.dtype,
            "policy.use_distributed_optimizer": self.config.use_distributed_optimizer,
            "optimizer.weight_decay_of": self._decayed,
        }
        return checkpoint.TrainState(self._model, self._optimizer, self._scheduler, settings)


def _main_gradient(parameter: Any) -> torch.Tensor:
    """Megatron's float32 gradient buffer of a parameter."""
    gradient: torch.Tensor = parameter.main_grad
    return gradient
