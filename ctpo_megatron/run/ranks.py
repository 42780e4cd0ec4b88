"""The trainer on all ranks: rank zero calls it, the other ranks serve."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.stop import StopSignal
from ctpo_megatron.config import (
    Chosen,
    Config,
    Job,
    OptimizerConfig,
    family_for,
    node_ranks,
    shares_gpus,
    spec_for,
    world_size,
)
from ctpo_megatron.config.schema import CheckpointConfig
from ctpo_megatron.data import Batch, Trajectory
from ctpo_megatron.engines.weights import EngineFacts, Manifest, TransportSettings, WeightTransport, open_transport
from ctpo_megatron.environments import exported_chat_template
from ctpo_megatron.plan import GIB, settled_as_before
from ctpo_megatron.policy import (
    CheckpointWriteError,
    Layout,
    RankLost,
    RankZeroError,
    Trainer,
    TrainResult,
    gpu_bytes,
    summarize_updates,
    supervised,
)
from ctpo_megatron.run.trace import StepTrace, stack_dump
from ctpo_megatron.tracking import Phases

if TYPE_CHECKING:
    from ctpo_megatron.engines import EnginePool
    from ctpo_megatron.engines.weights.checksums import Sums

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Command = tuple[str, tuple[Any, ...]]
"""What the other ranks run: a method, and its arguments."""

_END = "end"  # the command after which a rank serves no longer


def _on_all_ranks(
    *, gpus: bool = False
) -> Callable[[Callable[Concatenate[TrainerGroup, P], R]], Callable[Concatenate[TrainerGroup, P], R]]:
    """Have every rank run a method of `TrainerGroup` that rank zero calls; rank zero's result is returned.

    Arguments given by name stay on rank zero: the other ranks have their defaults. gpus: engines on the trainer's GPUs
    sleep first.
    """

    def decorate(body: Callable[Concatenate[TrainerGroup, P], R]) -> Callable[Concatenate[TrainerGroup, P], R]:
        @wraps(body)
        def call(group: TrainerGroup, /, *arguments: P.args, **named: P.kwargs) -> R:
            if gpus and group._pool is not None:
                group._pool.sleep(level=1)
            command = body.__name__, arguments
            group.layout.on_rank_zero(lambda: command)
            with group.layout.lost_ranks_named():
                return body(group, *arguments, **named)

        return call

    return decorate


class TrainerGroup:
    """All ranks of the trainer. Rank zero calls its methods, which every rank runs; the others `serve` meanwhile.

    A context manager: rank zero leaves it when the run ends, and the others with it. Where trainer and engines share
    GPUs (`share_gpus`), engines sleep before the trainer uses one.
    """

    trainer: Trainer
    """Set by `build`."""
    transport: WeightTransport
    """Set by `connect`."""
    _trace: StepTrace
    """Set by `begin_trace`."""

    def __init__(self, config: Config, layout: Layout, stop: StopSignal) -> None:
        self._config, self.layout, self._stop = config, layout, stop
        self._shares_gpus = shares_gpus(config)
        self.phases = Phases()
        self._open, self._connection, self._deferred = ExitStack(), ExitStack(), ExitStack()
        self._pool: EnginePool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # After a SystemExit the other ranks have theirs, or lose rank zero, as after a lost rank.
        ends = error is None or (isinstance(error, Exception) and not isinstance(error, RankLost))
        if self.layout.is_rank_zero and ends:
            self._end(error)
        self._deferred.close()
        self._connection.close()
        self._open.__exit__(kind, error, at)

    def _end(self, error: BaseException | None) -> None:
        """Let the other ranks end, or fail with rank zero's error."""

        def end() -> Command:
            if error is not None:
                raise error
            return _END, ()

        try:
            self.layout.on_rank_zero(end)
        except Exception as raised:
            if raised is not error:
                raise

    def serve(self) -> int:
        """Run on this rank what rank zero calls, until it leaves; returns the exit status.

        Raises RankZeroError when rank zero has failed, RankLost when it is gone.
        """
        while True:
            name, arguments = self.layout.on_rank_zero(_of_rank_zero)
            if name == _END:
                return self._stop.leave() if self._stop.is_set() else 0
            method = getattr(type(self), name)
            self.phases.progress.advance()  # stacks are dumped some time after it
            with self.layout.lost_ranks_named():
                # The body alone: the method itself would announce it again.
                method.__wrapped__(self, *arguments)
            faulthandler.cancel_dump_traceback_later()  # waiting for rank zero may take as long as that likes

    def share_gpus(self, pool: EnginePool) -> None:
        """From now on these engines sleep before the trainer uses a GPU."""
        self._pool = pool

    @_on_all_ranks()
    def dump_stacks(self, directory: Path, /, *, phases: Phases | None = None) -> None:
        """Have every rank write its stacks into the run directory before a time-out ends the run; see `stack_dump`.

        phases: of the run, which the trainer times on rank zero.
        """
        self.phases = phases or self.phases
        path, timeout_s = RunPaths(directory).stacks(self.layout.rank), 60 * self._config.policy.timeout_minutes
        self._open.enter_context(stack_dump(path, timeout_s, self.phases.progress))

    @contextmanager
    def stop_deferred(self) -> Iterator[None]:
        """Within, no rank stops before its state may have been saved."""
        self._defer_stop(True)
        yield
        self._defer_stop(False)

    @_on_all_ranks()
    def _defer_stop(self, deferred: bool) -> None:
        if deferred:
            self._deferred.enter_context(self._stop.deferred())
        else:
            self._deferred.close()

    @_on_all_ranks()
    def stop_agreed(self) -> bool:
        """Return whether any rank is to stop; then the stop signal is set on all."""
        return self._stop.agreed(self.layout.gather)

    @_on_all_ranks()
    def settle(self, before: Chosen | None) -> Config:
        """Choose what `auto` of the policy is, for the smallest GPU; returns the configuration that says so.

        before: the choice of a run that is resumed. Raises ConfigError where it, or nothing, fits.
        """
        gpus = [size for size in self.layout.gather(gpu_bytes()) if size is not None]

        def settled() -> Config:
            job, spec = Job(world_size(), node_ranks()), spec_for(self._config)
            config = settled_as_before(self._config, job, spec, min(gpus) / GIB, before)
            log.info("policy: at most %d tokens a micro-batch, recompute: %s", *config.policy.chosen[:2])
            return config

        if gpus:  # on CPUs `auto` is always the same
            self._config = self.layout.on_rank_zero(settled)
        return self._config

    @_on_all_ranks(gpus=True)
    def build(self, weights: Path | None = None, /) -> None:
        """Build the model of `model.path`. weights: directory that has them; None: `model.path`, too."""
        config = self._config
        self.trainer = Trainer(
            config.policy,
            self.layout,
            Path(config.model.path),
            temperature=config.rollout.temperature,
            family=family_for(config.model, config.extensions.path),
            weights=weights,
        )

    @_on_all_ranks(gpus=True)
    def compile_kernels(self) -> None:
        self.trainer.compile_kernels(self._config.objective)

    @_on_all_ranks(gpus=True)
    def use_optimizer(self, optimizer: OptimizerConfig, steps: int) -> None:
        self.trainer.use_optimizer(optimizer, steps)

    # Rank zero has the conversations and the batches, and the trainer sends every rank its share.
    @_on_all_ranks(gpus=True)
    def fine_tune(self, size: int, /, *, conversations: Sequence[Trajectory] = ()) -> dict[str, float]:
        """Make one supervised step of `size` conversations; returns its metrics."""
        (mini_batch,) = self.trainer.distribute(conversations, None, size)
        return summarize_updates([self.trainer.update(mini_batch, supervised(), temperature=1.0)])

    @_on_all_ranks(gpus=True)
    def prepare_rl(self) -> None:
        config = self._config
        self.trainer.prepare_rl(config.objective, config.rollout, config.run, config.tracking, self.phases)

    def train(self, batch: Batch) -> TrainResult:
        """Make the updates of one RL step; see `Trainer.train`."""
        return self._train(batch.weight_versions, batch=batch)

    @_on_all_ranks(gpus=True)
    def _train(self, weight_versions: tuple[int, ...], /, *, batch: Batch | None = None) -> TrainResult:
        return self.trainer.train(batch or Batch([], weight_versions=weight_versions))

    @property
    def version(self) -> int:
        """Of the current weights; see `Trainer`."""
        return self.trainer.version

    @_on_all_ranks()
    def begin_trace(self, step: int) -> None:
        """Record what every rank does, until `end_trace`."""
        self._trace = StepTrace(self.phases, step)

    @_on_all_ranks()
    def end_trace(self, step: int, directory: Path) -> None:
        """Write the trace of every rank into the run directory."""
        self._trace.write(RunPaths(directory).trace(step, self.layout.rank))

    @_on_all_ranks()
    def connect(self, facts: EngineFacts, /, *, pool: EnginePool | None = None) -> None:
        """Open the transport of the weights to these engines. Raises EngineError where it would leave some behind."""
        settings = TransportSettings.of(self._config.rollout.weights, self._config.cluster.node_address)
        manifest = Manifest(self.trainer.weight_shapes())
        manifest.check_model(Path(self._config.model.path))
        self.transport = open_transport(self.layout, facts, settings, manifest, pool)
        self._connection.callback(self.transport.close)

    def disconnect(self) -> None:
        """Close rank zero's transport, before the engines go; not collective."""
        self._connection.close()

    @_on_all_ranks(gpus=True)
    def announce(self, version: int) -> dict[str, Any] | None:
        """Announce the current weights to the engines, which wake for them where they share GPUs with the trainer."""
        self._empty_cache()
        self.layout.wait_for_ranks()
        return self.transport.announce(version)

    @_on_all_ranks()
    def send(self, version: int) -> Sums:
        """Send what was announced; see `WeightTransport`."""
        return self.transport.send(self.trainer.weights(own_stage=self.transport.by_stage), version)

    @_on_all_ranks()
    def release(self) -> None:
        """Offload what `policy.offload` names; return when all ranks have."""
        self.trainer.release()
        self._empty_cache()
        self.layout.wait_for_ranks()

    def _empty_cache(self) -> None:
        """Before engines on these GPUs take memory: torch would keep what the trainer has freed."""
        if self._shares_gpus:
            self.trainer.empty_cache()

    # Every rank fails to write at the same point, and continues: rank zero decides what follows.
    @_on_all_ranks(gpus=True)
    def save(
        self,
        directory: Path,
        step: int,
        settings: CheckpointConfig,
        /,
        *,
        state: dict[str, Any] | None = None,
        score: float | None = None,
        attached: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    ) -> CheckpointWriteError | None:
        """See `Trainer.save`; returns why the checkpoint, or the one before it, could not be written."""
        return _failure(lambda: self.trainer.save(directory, step, state or {}, settings, score, attached))

    @_on_all_ranks()
    def finish_save(self, wait: bool = True) -> CheckpointWriteError | None:
        """Complete a checkpoint, without `wait` only if it is written; returns why it could not be written."""
        return _failure(lambda: self.trainer.finish_save(wait=wait))

    @_on_all_ranks(gpus=True)
    def load(self, checkpoint: Path, steps: int) -> dict[str, Any]:
        """Restore a checkpoint, with the schedule of a stage of `steps` steps; returns the run's state in it."""
        state = self.trainer.load(checkpoint)
        self.trainer.set_scheduler_step(state.get("step", 0) / max(1, steps))  # an evaluation alone has none
        return state

    @_on_all_ranks(gpus=True)
    def export(self, directory: Path, step: int | None = None, /) -> None:
        self.trainer.export(directory, exported_chat_template(self._config.model), step)


def _failure(write: Callable[[], object]) -> CheckpointWriteError | None:
    try:
        write()
    except CheckpointWriteError as error:
        return error
    except RankZeroError as error:  # of its part in a save
        if not isinstance(error.__cause__, CheckpointWriteError | OSError):
            raise
    return None


def _of_rank_zero() -> Command:
    raise AssertionError("rank zero calls, it does not serve")
