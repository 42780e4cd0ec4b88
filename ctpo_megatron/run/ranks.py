"""The trainer on all ranks: rank zero calls it, the other ranks serve."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from ctpo_megatron.base.stop_signal import StopSignal
from ctpo_megatron.config import Config, OptimizerConfig, family_for, run_chat_template
from ctpo_megatron.config.schema import CheckpointConfig
from ctpo_megatron.data import Batch, Trajectory
from ctpo_megatron.engines import EnginePool
from ctpo_megatron.engines.weights import (
    EngineFacts,
    TransportSettings,
    WeightOffer,
    WeightTransport,
    open_transport,
)
from ctpo_megatron.policy import Layout, Trainer, TrainResult, TrainSettings, summarize_updates, supervised
from ctpo_megatron.run.watchdog import Watchdog
from ctpo_megatron.tracking import Phases

log = logging.getLogger(__name__)

_END = "end"  # the command after which a rank serves no longer


class TrainerRank:
    """One rank's share of the trainer. Every public method is collective: all ranks run the same ones, in one order."""

    trainer: Trainer
    """The model; there after `build`."""
    transport: WeightTransport
    """There after `connect`."""
    offered: WeightOffer
    """The latest offer; there after `offer`."""

    def __init__(self, config: Config, layout: Layout, stop: StopSignal) -> None:
        self._config, self._layout, self._stop = config, layout, stop
        self.phases = Phases()
        self._open, self._connection, self._deferred = ExitStack(), ExitStack(), ExitStack()

    def watchdog(self, directory: Path) -> Watchdog:
        """Records whether this rank makes progress, and dumps its stacks when none does; not collective."""
        run, progress = self._config.run, self.phases.progress
        timeout_s, end = run.stall_timeout_s, run.end_on_stall
        return Watchdog(progress, self._layout.rank_zero, directory, timeout_s=timeout_s, end=end)

    def watch(self, directory: Path) -> None:
        """Have a watchdog from now on."""
        self._open.enter_context(self.watchdog(directory))

    def defer_stop(self) -> None:
        """From now on the state may be saved before this process stops."""
        self._deferred.enter_context(self._stop.deferred())

    def stop_at_once(self) -> None:
        """There is nothing to save any more: this process stops when it is told to."""
        self._deferred.close()

    def stop_agreed(self) -> bool:
        """Whether a rank is to stop."""
        return self._stop.agreed(self._layout)

    def build(self) -> None:
        """Build the model with the weights of `model.path`."""
        config = self._config
        self.trainer = Trainer(
            config.policy,
            self._layout,
            Path(config.model.path),
            temperature=config.rollout.temperature,
            family=family_for(config.model, config.extensions.path),
        )

    def use_optimizer(self, optimizer: OptimizerConfig, steps: int) -> None:
        """See `Trainer.use_optimizer`."""
        self.trainer.use_optimizer(optimizer, steps)

    def fine_tune(self, conversations: list[Trajectory], size: int) -> dict[str, float]:
        """One supervised step of `size` conversations, which rank zero has; its metrics."""
        (mini_batch,) = self.trainer.distribute(conversations, None, size)
        return summarize_updates([self.trainer.update(mini_batch, supervised(), temperature=1.0)])

    def prepare_rl(self) -> None:
        """See `Trainer.prepare_rl`."""
        config = self._config
        settings = TrainSettings.of(
            config.objective,
            config.policy,
            config.rollout,
            batches=config.run.steps,
            skip_zero_advantage=config.leaves_out_zero_advantage,
            diagnostics=config.tracking.trajectories != "none",
        )
        self.trainer.prepare_rl(settings, self.phases)

    def train(self, batch: Batch) -> TrainResult:
        """See `Trainer.train`."""
        return self.trainer.train(batch)

    def connect(self, facts: EngineFacts) -> None:
        """Open the transport of the weights to these engines."""
        settings = TransportSettings.of(self._config.rollout.weights, self._config.cluster.node_address)
        self.transport = open_transport(self._layout, facts, settings)
        self._connection.callback(self.transport.close)

    def disconnect(self) -> None:
        """Close this rank's transport, if there is one; not collective."""
        self._connection.close()

    def offer(self, version: int) -> WeightOffer:
        """Offer the current weights to the engines."""
        self.offered = self.transport.offer(self.trainer, version)
        return self.offered

    def transfer(self) -> None:
        """Let the tensors of the latest offer travel."""
        self.offered.transfer()

    def release(self) -> None:
        """Leave the GPUs, where `policy.offload` says so, and return when all ranks have."""
        self.trainer.release()
        self._layout.wait_for_ranks()

    def save(
        self,
        directory: Path,
        step: int,
        state: dict[str, Any],
        settings: CheckpointConfig,
        score: float | None = None,
        attached: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """See `Trainer.save`; rank zero's state, score and attached files are kept."""
        self.trainer.save(directory, step, state, settings, score, attached)

    def finish_save(self, wait: bool) -> None:
        """See `Trainer.finish_save`."""
        self.trainer.finish_save(wait=wait)

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """See `Trainer.load`."""
        return self.trainer.load(checkpoint)

    def set_schedule(self, fraction: float) -> None:
        """See `Trainer.set_scheduler_step`."""
        self.trainer.set_scheduler_step(fraction)

    def export(self, directory: Path) -> None:
        """See `Trainer.export`."""
        self.trainer.export(directory, run_chat_template(self._config.model))

    def close(self, *error: Any) -> None:
        """Release what this rank has opened; not collective. error: as `__exit__` gets it."""
        self._deferred.close()
        self._connection.close()
        self._open.__exit__(*error)


class TrainerGroup:
    """All ranks of the trainer. Rank zero calls its methods, which every rank runs; the others `serve` meanwhile.

    A context manager: rank zero leaves it when the run is over, and the others with it. Where trainer and engines share
    GPUs (`share_gpus`), engines sleep before the trainer uses one.
    """

    def __init__(self, config: Config, layout: Layout, stop: StopSignal) -> None:
        self.layout, self._stop = layout, stop
        self._rank = TrainerRank(config, layout, stop)
        self._pool: EnginePool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A SystemExit ends rank zero alone: the other ranks have theirs, or lose rank zero.
        if self.layout.is_rank_zero and (error is None or isinstance(error, Exception)):
            self._end(error)
        self._rank.close(kind, error, at)

    def _end(self, error: Exception | None) -> None:
        """Let the other ranks end, or fail with rank zero's error."""

        def end() -> tuple[str, str, tuple[()]]:
            if error is not None:
                raise error
            return _END, "", ()

        try:
            self.layout.on_rank_zero(end)
        except Exception as raised:
            if error is None:
                raise
            if raised is not error:  # such as a lost rank; the caller raises the error that came first
                log.warning("the other ranks were not told of the failure: %s", raised)

    def serve(self) -> int:
        """Run on this rank what rank zero calls, until it leaves; returns the exit status.

        Raises RankZeroError when rank zero has failed, RankLost when it is gone.
        """
        while True:
            name, phase, arguments = self.layout.on_rank_zero(_of_rank_zero)
            if name == _END:
                return self._stop.leave() if self._stop.is_set() else 0
            with self._rank.phases.progress.within(phase):
                getattr(self._rank, name)(*arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Run a method of `TrainerRank` on all ranks, with these arguments; rank zero's result."""
        self._announce(name, *arguments)
        return getattr(self._rank, name)(*arguments)

    def _announce(self, name: str, *arguments: Any) -> None:
        """Have the other ranks run a method of `TrainerRank`."""
        command = name, self._rank.phases.progress.phase, arguments
        self.layout.on_rank_zero(lambda: command)

    def _use_gpus(self) -> None:
        if self._pool is not None:
            self._pool.sleep(level=1)

    def watched(self, directory: Path, phases: Phases) -> Watchdog:
        """Have a watchdog on every rank; rank zero's is returned. phases: of the run, which the trainer times on rank
        zero."""
        self._rank.phases = phases
        self._announce("watch", directory)
        return self._rank.watchdog(directory)

    def share_gpus(self, pool: EnginePool) -> None:
        """From now on these engines sleep before the trainer uses a GPU."""
        self._pool = pool

    @contextmanager
    def stop_deferred(self) -> Iterator[None]:
        """Within, no rank stops before its state may have been saved."""
        self._call("defer_stop")
        yield
        self._call("stop_at_once")

    def stop_agreed(self) -> bool:
        """Whether any rank is to stop; then the stop signal is set on all."""
        return bool(self._call("stop_agreed"))

    def build(self) -> None:
        """See `TrainerRank.build`."""
        self._use_gpus()
        self._call("build")

    def use_optimizer(self, optimizer: OptimizerConfig, steps: int) -> None:
        """See `Trainer.use_optimizer`."""
        self._use_gpus()
        self._call("use_optimizer", optimizer, steps)

    def fine_tune(self, conversations: list[Trajectory], size: int) -> dict[str, float]:
        """See `TrainerRank.fine_tune`."""
        self._use_gpus()
        self._announce("fine_tune", [], size)
        return self._rank.fine_tune(conversations, size)

    def prepare_rl(self) -> None:
        """See `Trainer.prepare_rl`."""
        self._use_gpus()
        self._call("prepare_rl")

    def train(self, batch: Batch) -> TrainResult:
        """The updates of one RL step; see `Trainer.train`."""
        self._use_gpus()
        self._announce("train", Batch([], weight_versions=batch.weight_versions))
        return self._rank.train(batch)

    @property
    def version(self) -> int:
        """Of the current weights; see `Trainer`."""
        return self._rank.trainer.version

    def connect(self, facts: EngineFacts) -> None:
        """See `TrainerRank.connect`."""
        self._call("connect", facts)

    def offer(self, version: int) -> WeightOffer:
        """Offer the current weights to the engines."""
        self._use_gpus()
        self._announce("offer", version)
        return self._rank.offer(version)

    def transfer(self) -> None:
        """Let the tensors of the latest offer travel."""
        self._call("transfer")

    def disconnect(self) -> None:
        """Close rank zero's transport, before the engines go; not collective."""
        self._rank.disconnect()

    def release(self) -> None:
        """Leave the GPUs; see `Trainer.release`."""
        self._call("release")

    def save(
        self,
        directory: Path,
        step: int,
        state: dict[str, Any],
        settings: CheckpointConfig,
        score: float | None = None,
        attached: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """See `Trainer.save`."""
        self._use_gpus()
        self._announce("save", directory, step, {}, settings)
        self._rank.save(directory, step, state, settings, score, attached)

    def finish_save(self, *, wait: bool = True) -> None:
        """See `Trainer.finish_save`."""
        self._call("finish_save", wait)

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """See `Trainer.load`."""
        self._use_gpus()
        state: dict[str, Any] = self._call("load", checkpoint)
        return state

    def set_schedule(self, fraction: float) -> None:
        """See `Trainer.set_scheduler_step`."""
        self._call("set_schedule", fraction)

    def export(self, directory: Path) -> None:
        """See `Trainer.export`."""
        self._use_gpus()
        self._call("export", directory)


def _of_rank_zero() -> tuple[str, str, tuple[Any, ...]]:
    raise AssertionError("rank zero calls, it does not serve")
