"""The Megatron model on all ranks: train, weights, save, load, export."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core import parallel_state as mpu

from ctpo_megatron.config import (
    ObjectiveConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    TrackingConfig,
    advantage_from_config,
    objective_from_config,
    read_spec,
)
from ctpo_megatron.config.schema import CheckpointConfig
from ctpo_megatron.data import TokenSequence, Trajectory
from ctpo_megatron.data.trajectory import Batch
from ctpo_megatron.models import ModelFamily
from ctpo_megatron.objective import (
    Advantage,
    LossStats,
    PolicyObjective,
    batch_advantages,
    turn_advantages,
    warm_up_kernels,
    window_metrics,
)
from ctpo_megatron.plan import Split, repeated_token_share
from ctpo_megatron.policy import device, hf
from ctpo_megatron.policy.checkpoint import CheckpointStore
from ctpo_megatron.policy.device import DeviceMemory
from ctpo_megatron.policy.hf import write_directory
from ctpo_megatron.policy.layers import compile_layers
from ctpo_megatron.policy.minibatch import (
    Anchor,
    MiniBatch,
    all_micro_batches,
    checked_sequences,
    in_turn,
    make_mini_batches,
    packing_rules,
    share_outline,
)
from ctpo_megatron.policy.model import build_model, gather_gradient_shards
from ctpo_megatron.policy.old_log_probs import OldLogProbs, SampledBy, check_mismatch, start_metrics
from ctpo_megatron.policy.optimizer import OptimizerSteps
from ctpo_megatron.policy.parallel import Layout
from ctpo_megatron.policy.passes import LossFunction, Passes, configured_loss
from ctpo_megatron.policy.reports import (
    Diagnostics,
    StepPositions,
    Update,
    gather_diagnostics,
    gather_positions,
    of_trajectories,
    summarize_updates,
)
from ctpo_megatron.policy.router_replay import checked_choices

if TYPE_CHECKING:
    from ctpo_megatron.tracking import Phases


@dataclass(frozen=True)
class TrainResult:
    """metrics: of the RL step, complete on rank zero. diagnostics: see `Trainer.token_diagnostics`; may be empty.

    positions: statistics by position, on rank zero. dumped: see `tracking.dump_every`.
    """

    metrics: dict[str, float]
    diagnostics: Diagnostics
    positions: StepPositions | None = None
    dumped: bool = False


class _Reinforcement:
    """The RL phase of a trainer: sections of its configuration, and what follows from them, which no step asks again.

    Equal on every rank.

    updates_per_batch: optimizer steps of a full batch, in all its passes. mini_batch_size: trajectories of one
    optimizer step, over all ranks. foreign: batches may be another policy's, whatever their weight versions: of a
    recording, whose log-probs are the anchor. ratio: the objective whose ratio and bounds are known; None for a user's
    own. by_turn: rewards of turns are trained on. knows_turns: the loss is given the turn of every token. dtypes: of
    trainer and sampler.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        policy: PolicyConfig,
        rollout: RolloutConfig,
        run: RunConfig,
        tracking: TrackingConfig,
        phases: Phases,
        passes: Passes,
        layout: Layout,
    ) -> None:
        self.anchor, self.rollout, self.run, self.tracking, self.phases = config.anchor, rollout, run, tracking, phases
        self.skip_zero_advantage = policy.skip_zero_advantage and not config.needs_zero_advantage
        self.updates_per_batch = rollout.prompts_per_step // policy.mini_batch_prompts * policy.passes_per_batch
        self.mini_batch_size = policy.mini_batch_prompts * rollout.samples_per_prompt
        self.foreign = rollout.replay is not None and config.anchor == "behaviour"
        self.dtypes = policy.dtype, rollout.engine.precision(policy.dtype)
        self.advantage = advantage_from_config(config)
        self.objective = objective_from_config(config)
        self.ratio = None if config.function else self.objective
        self.loss = configured_loss(config)
        self.old_log_probs = OldLogProbs(config, self.objective, passes, layout)
        self.by_turn = config.by_turn
        self.knows_turns = config.by_turn or config.function is not None

    def advantages(self, batch: Batch) -> Sequence[Advantage]:
        """Return one advantage per trajectory; empty on ranks other than zero."""
        if self.by_turn:
            return turn_advantages([group.returns for group in batch.trained], self.advantage)
        return batch_advantages([group.rewards for group in batch.trained], self.advantage)

    def is_dumped(self, step: int) -> bool:
        """Return whether every optimizer step of this RL step is kept token by token: `tracking.dump_every`."""
        return step in (1, self.run.steps) or step % self.tracking.dump_every == 0


class Trainer:
    """A Megatron-Core language model under training; every method is collective over all ranks.

    The architecture and the weights come from the Hugging Face directory `model_path`. Log-probs are of softmax(logits
    / temperature), the distribution that rollouts are sampled from. family: the user's model family, or None.
    weights: directory that has the weights; None: `model_path`. version: of the current weights; 1 before the first
    batch.
    """

    def __init__(
        self,
        config: PolicyConfig,
        layout: Layout,
        model_path: Path,
        *,
        temperature: float,
        family: ModelFamily | None = None,
        weights: Path | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.source = model_path
        self.spec = read_spec(model_path, family)
        self.version = 1
        with device.scope():
            self._model = build_model(self.spec, config, layout.device)
            self._parameters = hf.model_parameters(self._model, layout)
            hf.load(self._model, self._parameters, weights or model_path, layout)
        self._memory = DeviceMemory(config, self._model)
        self._passes = Passes(self._model, layout, self._memory, temperature)
        self._checkpoints = CheckpointStore(self._model, layout, config)
        self._flops, self._rules = self.spec.forward_flops, packing_rules(config)
        if self._model.shares_prefixes and self._model.whole_attention:
            repeated = repeated_token_share(self.spec, Split.of(config, layout.world_size))
            self._rules = replace(self._rules, repeated_token=repeated)
        self._optimizer_steps: OptimizerSteps | None = None
        self._rl: _Reinforcement | None = None

    def compile_kernels(self, objective: ObjectiveConfig) -> None:
        """Compile the kernels of layers, log-probs and loss, seconds each; returns when every rank has.

        Otherwise each compiles at its first launch, within a step. Ranks compile at the same time and wait for each
        other with the deadline `policy.timeout_minutes`. Nothing is compiled on a CPU.
        """
        if not self._model.whole_attention:
            compile_layers(self._model.config, self.layout.device)
        if self.layout.is_last_stage:
            weight = self._model.output_weight
            warm_up_kernels(
                None if objective.function else objective_from_config(objective),
                torch.tensor([0, 4, 8], dtype=torch.int32).to(self.layout.device),
                streaming=self._model.streaming,
                columns=weight.shape[0],
                vocab_size=self.spec.vocab_size,
                dtype=weight.dtype,
                weighted=objective.correction.level != "none",
                tp_group=mpu.get_tensor_model_parallel_group(),
                cp_group=mpu.get_context_parallel_group() if self.layout.cp_size > 1 else None,
            )
        self.layout.wait_for_ranks()

    def prepare_rl(
        self,
        objective: ObjectiveConfig,
        rollout: RolloutConfig,
        run: RunConfig,
        tracking: TrackingConfig,
        phases: Phases,
    ) -> None:
        """Start the RL phase, for `train`: a fresh optimizer with a schedule over all batches.

        Raises ExtensionError for a user's objective that cannot be found or called.
        """
        rl = _Reinforcement(objective, self.config, rollout, run, tracking, phases, self._passes, self.layout)
        self.use_optimizer(self.config.optimizer, run.steps * rl.updates_per_batch)
        self._rl = rl

    def train(self, batch: Batch) -> TrainResult:
        """Make the updates of one RL step (Algorithm 1 of the paper); `version` is then one higher.

        batch: its groups are on rank zero only, its weight versions on every rank. Raises RuntimeError before the first
        optimizer step when sampler and trainer differ by more than the limit, DataError for tokens of another
        vocabulary, FloatingPointError as `update`.
        """
        if (rl := self._rl) is None:
            raise RuntimeError("prepare_rl comes before train")
        rollout, steps = rl.rollout, self._steps
        own: SampledBy = "these" if batch.is_of(self.version) else "earlier"
        sampled_by = "others" if rl.foreign else own
        # Every batch raises the version by one, so that this is the step, also in a resumed run.
        dumped = rl.is_dumped(self.version)
        with rl.phases.phase("old_log_probs"):
            advantages = rl.advantages(batch)
            mini_batches = self.distribute(
                batch.trajectories,
                advantages,
                rl.mini_batch_size,
                version=self.version,
                skip_zero_advantage=rl.skip_zero_advantage,
                pack_skipped=dumped,
                by_turn=rl.knows_turns,
            )
            if skipped := [micro for mini_batch in mini_batches for micro in mini_batch.skipped_micro_batches]:
                self._passes.score(skipped, old=True)
            # of the passes so far, also over what is skipped
            metrics = rl.old_log_probs.before_updates(mini_batches, sampled_by)
        with rl.phases.phase("update"):
            updates: list[Update] = []
            trained: list[MiniBatch] = []
            passes = self.config.passes_per_batch
            for mini_batch in in_turn(mini_batches, passes, f"{rl.run.seed}/mini-batches/{self.version}"):
                if updates and mini_batch.skipped_micro_batches:  # before the first update they are the old log-probs
                    self._passes.score(mini_batch.skipped_micro_batches)
                gradient = steps.gradient(mini_batch, rl.loss)
                if not updates:
                    # Now all old log-probs are known and no weight has changed, so a bad batch can still be refused.
                    metrics |= rl.old_log_probs.after_first_gradient(mini_batches, sampled_by)
                    check_mismatch(metrics, rollout.mismatch_limit, rollout.max_response_tokens, rl.dtypes)
                updates.append(steps.apply(gradient))
                trained.append(mini_batch)
            steps.skip(rl.updates_per_batch - len(updates))
            metrics |= summarize_updates(updates, passes)
        with rl.phases.phase("token_diagnostics"):
            applied = [mini for mini, update in zip(trained, updates, strict=True) if update.applied]
            positions = gather_positions(applied, rl.ratio, rl.anchor, self.layout)
            metrics |= positions.metrics() if positions else {}
            judged = zip(batch.trajectories, advantages, strict=True)
            lengths = [each.sequence_model_tokens for each, value in judged if value is not None]
            metrics |= window_metrics([*itertools.chain.from_iterable(lengths)], rl.ratio)
            shown = trained[-len(mini_batches) :] if dumped else trained[-1:]
            diagnostics: Diagnostics = {}
            for mini_batch in shown if rl.tracking.trajectories != "none" else ():
                diagnostics |= self.token_diagnostics(mini_batch, rl.objective, rl.anchor)
            diagnostics = of_trajectories(diagnostics, batch.trajectories)
        self.version += 1
        return TrainResult(metrics | {"weights/version": float(self.version)}, diagnostics, positions, dumped)

    def use_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """Start a phase of training: AdamW with fresh state and a schedule over `total_steps` optimizer steps.

        Weight decay is on matrices and embeddings, on norms and biases only with `weight_decay_of: all`.
        """
        before = self._optimizer_steps
        bad_in_a_row = 0 if before is None else before.bad_in_a_row
        with self._memory.in_use():
            self._optimizer_steps = OptimizerSteps(
                self._model, self.config, config, total_steps, self._passes, bad_in_a_row
            )

    def set_scheduler_step(self, fraction: float) -> None:
        """See `OptimizerSteps.set_schedule`."""
        self._steps.set_schedule(fraction)

    @property
    def _steps(self) -> OptimizerSteps:
        if self._optimizer_steps is None:
            raise RuntimeError("use_optimizer comes before updates and checkpoints")
        return self._optimizer_steps

    def distribute(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[Advantage] | None,
        size: int,
        *,
        version: int | None = None,
        skip_zero_advantage: bool = False,
        pack_skipped: bool = False,
        by_turn: bool = False,
    ) -> list[MiniBatch]:
        """Optimizer steps of `size` trajectories each, in order, from the trajectories of rank zero.

        Ranks other than zero may pass none; each rank gets what it trains on. advantages: None for a supervised loss;
        a trajectory whose advantage is None takes no part. by_turn: tokens have their turns, and may have advantages of
        turns.
        version: of the current weights; tokens of other versions are not compared. None: all are compared.
        See `checked_sequences` and `make_mini_batches`.
        """
        known: Sequence[Advantage] = [0.0] * len(trajectories) if advantages is None else advantages

        def check() -> list[TokenSequence]:
            found = checked_sequences(trajectories, known, self.spec.vocab_size, version, by_turn=by_turn)
            return checked_choices(found, self.spec) if self.config.router_replay else found

        sequences, overall, order = share_outline(check, known, self.layout, ordered=self._model.shares_prefixes)
        mini_batches = make_mini_batches(
            sequences,
            overall,
            size=size,
            rules=self._rules,
            layout=self.layout,
            flops=self._flops,
            whole_attention=self._model.whole_attention,
            order=order,
            skip_zero_advantage=skip_zero_advantage,
            pack_skipped=pack_skipped,
        )
        for micro in itertools.chain.from_iterable((m.micro_batches + m.skipped_micro_batches) for m in mini_batches):
            micro.version = version
        return mini_batches

    def compute_old_log_probs(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """Fill `old_log_probs` with the log-probs of the current weights, in the layout that training will use.

        Returns `start_metrics`, and `RouterReplays.take_metrics`.
        """
        self._passes.score(all_micro_batches(mini_batches), old=True)
        return start_metrics(mini_batches, self.layout) | self._passes.router_metrics()

    def update(self, mini_batch: MiniBatch, loss_function: LossFunction, *, temperature: float | None = None) -> Update:
        """Make one optimizer step; `temperature` is used instead of the rollouts' temperature (1 for a supervised
        loss).

        A step whose loss or gradient norm is not finite on any rank changes neither weights nor optimizer state; the
        schedule advances. In float16 the loss scale follows. Raises FloatingPointError at the last of
        `policy.max_bad_steps` such steps in a row, without any whose gradient only overflows.
        """
        return self._steps.apply(self._steps.gradient(mini_batch, loss_function, temperature))

    def gradients(
        self, mini_batch: MiniBatch, loss_function: LossFunction
    ) -> tuple[LossStats, Iterator[tuple[str, torch.Tensor]]]:
        """Statistics of a mini-batch and (Hugging Face name, full float32 gradient); iterate to the end on every rank.

        Nothing is updated. The gradients are those that `update` passes to its optimizer.
        """
        with self._memory.on_device():
            collected = self._passes.accumulate(mini_batch, loss_function)
            stats, *_ = self._passes.over_ranks(collected, mini_batch)
            if self.config.use_distributed_optimizer:
                with device.scope():
                    gather_gradient_shards(self._model)
        scale = self._model.gradient_scale
        # Megatron's float32 gradient buffer of each parameter.
        gradients = hf.export(
            self._parameters, self.spec, self.layout, value=lambda weight: cast(Any, weight).main_grad / scale
        )
        return stats, gradients

    def token_diagnostics(
        self, mini_batch: MiniBatch, objective: PolicyObjective, anchor: Anchor = "proximal"
    ) -> Diagnostics:
        """Return how far each sequence of a mini-batch was from the anchor in the latest pass over it, usually its
        update's.

        Index among the sequences of the batch -> `advantage`, and `log_ratio`, `clip_low`, `clip_high`, arrays `[T]` in
        nats; on rank zero. `prefix_log_ratio`, S_t, as well where `log_ratio` is another.
        """
        every = [*mini_batch.micro_batches, *mini_batch.skipped_micro_batches]
        micro_batches = every if self.layout.reports else []
        return gather_diagnostics(micro_batches, objective, anchor)

    def weights(self, *, own_stage: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of the whole model, one at a time, on every rank; iterate to the end.

        own_stage: of this rank's pipeline stage alone.
        """
        with self._memory.weights_complete():
            yield from hf.export(self._parameters, self.spec, self.layout, own_stage=own_stage)

    def weight_shapes(self) -> hf.Declared:
        """Name, shape and dtype of all `weights`, in their order, on every rank. No weight is moved."""
        return hf.declare(self._parameters, self.layout)

    def export(self, directory: Path, chat_template: str | None = None, step: int | None = None) -> None:
        """Write a Hugging Face model directory: weights, and configuration and tokenizer of the source model.

        chat_template: Jinja text instead of the source model's. step: the RL step of the weights, which is recorded.
        """
        write_directory(self.weights(), self.source, directory, self.layout, chat_template=chat_template, step=step)

    def release(self) -> None:
        """Move what `policy.offload` names to host memory. Other methods move it back when they are called."""
        steps = self._optimizer_steps
        self._memory.release(None if steps is None else steps.optimizer)

    def empty_cache(self) -> None:
        """Give GPU memory that torch keeps for later tensors back to the driver, for other processes."""
        device.release_cached_memory()

    def save(
        self,
        directory: Path,
        step: int,
        run_state: dict[str, Any],
        config: CheckpointConfig | None = None,
        score: float | None = None,
        attached: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    ) -> Path:
        """Checkpoint weights, optimizer, schedule, random streams, driver's state; see `CheckpointStore.save`."""
        with self._memory.weights_complete():
            settings = config or CheckpointConfig()
            return self._checkpoints.save(directory, step, self._steps, run_state, settings, score, attached)

    def finish_save(self, *, wait: bool = True) -> None:
        """Complete an asynchronous save; without `wait`, only if it is done. See `CheckpointStore.finish`."""
        with device.scope():
            self._checkpoints.finish(wait=wait)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint and return the driver's state, which sets `version`; see `CheckpointStore.load`."""
        with self._memory.in_use():
            run_state = self._checkpoints.load(path, self._steps)
        self.version = run_state.get("weights_version", 1)  # a checkpoint of SFT has no version
        return run_state

    def load_weights(self, path: Path) -> dict[str, Any]:
        """Restore the weights of a checkpoint, no optimizer; returns the driver's state in it."""
        with self._memory.in_use():
            return self._checkpoints.load(path, None)
