"""The pool: all engines of a run, started, given weights, put to sleep, and replaced when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from ray.exceptions import RayError

from ctpo_megatron.base.event_loop import EventLoop, Work, end
from ctpo_megatron.base.ray_environment import ADDRESS
from ctpo_megatron.base.run_paths import RunPaths, step_name
from ctpo_megatron.base.stop import Cancelled, NeverStop, StopRequest
from ctpo_megatron.config import Config, ConfigError, Device, Placement, Problem, choose_transport, engine_count
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines.handle import EngineHandle, EngineUpdate, ask_all
from ctpo_megatron.engines.ray_runtime import EnginePlaces, NodeCheck, RayRuntime
from ctpo_megatron.engines.tasks import (
    INITIAL_VERSION,
    EngineDied,
    EngineError,
    EngineSpec,
    GroupFailed,
    GroupTask,
    pool_stats,
)
from ctpo_megatron.engines.weights import EngineFacts, SendsWeights
from ctpo_megatron.environments import needs_sandbox, open_sandbox

T = TypeVar("T")
WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's tags of what an engine holds in GPU memory."""
_SLEEP_AT_STOP_S = 10.0
"""For engines to free their GPUs when the run is to stop."""
_TRACE_S = 120.0
"""For engines to begin a trace, or to write it."""
_SEND_ATTEMPTS = 2
"""To send weights that no engine has taken."""
_RAY_POLL_S, _WATCH_S = 0.05, 1.0
"""How often Ray's start is checked, and whether its processes live."""

log = logging.getLogger(__name__)


@contextmanager
def open_engines(
    config: Config,
    logs: Path,
    loop: EventLoop,
    *,
    placement: Placement | None,
    check: Callable[[], NodeCheck],
    stop: StopRequest | None = None,
) -> Iterator[EnginePool]:
    """Engines with the weights of `model.path`, which load in the background, and the sandbox that they need.

    logs: folder for the output of both. loop: runs the pool. placement: the engines' GPUs; None: Ray may have all.
    check: makes what every node of a Ray cluster has to pass, where RAY_ADDRESS names one. stop: ends waits.
    Raises ConfigError, SandboxStartError.
    """
    on_cluster = bool(os.environ.get(ADDRESS))
    if not on_cluster and config.cluster.nodes > 1:
        fix = "start the run with `ctpo launch`, or Ray on every node and export RAY_ADDRESS=HOST:PORT of its head"
        raise ConfigError([Problem("cluster.nodes", "but RAY_ADDRESS names no Ray cluster", fix, config.cluster.nodes)])
    with ExitStack() as stack:
        url: str | None = ""
        if needs_sandbox(config.rollout):
            url = stack.enter_context(open_sandbox(config.sandbox, config.cluster.nodes, logs))
        log.info("engines: vLLM's model runner %s", config.rollout.engine.model_runner)
        where: dict[str, Any] = {"check": check()} if on_cluster else {"placement": placement}
        pool = stack.enter_context(EnginePool(config, url, loop, log_dir=logs, stop=stop, **where))
        pool.start()
        yield pool


class EnginePool:
    """All engines of a run, on an event loop: coroutines run there, all other methods are the trainer's thread's.

    An engine that died is started again, and gets its weights in the next update; the run ends when none is left to
    sample. loop: that loop. settings: section `rollout`. counts: of what `stats` reports. version: of the weights that
    engines have. failure: why the engines cannot continue. observers: are called on the loop when an engine serves
    that did not, and when there is a failure.

    config: the whole run configuration. The engines start from `model.path`, whose weights are version 0; `run.seed` is
    part of every sampling seed.
    sandbox_url: base URL of the code execution service; None: every node has its own. log_dir: None: `logs` in the run
    directory. placement: whose the GPUs of this node are; None without any, or where Ray may have all. check: what
    every node of the cluster of RAY_ADDRESS has to pass, where the engines run; None: they run on this node.
    stop: ends every wait of the pool, with Cancelled. It is asked to when no engine can be replaced or none is left;
    without one the pool raises EngineError then.
    """

    def __init__(
        self,
        config: Config,
        sandbox_url: str | None,
        loop: EventLoop,
        *,
        log_dir: Path | None = None,
        placement: Placement | None = None,
        check: NodeCheck | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        log_dir = (log_dir or RunPaths(config.run.directory).logs.root).resolve()
        # Absolute, as engines may run in other folders.
        model = config.model.model_copy(update={"path": str(Path(config.model.path).absolute())})
        run = config.run.model_copy(update={"root": str(Path(config.run.root).absolute())})
        folders = tuple(str(Path(folder).resolve()) for folder in config.extensions.path or ())
        extensions = config.extensions.model_copy(update={"path": folders})
        absolute = config.model_copy(update={"model": model, "run": run, "extensions": extensions})
        self._spec = EngineSpec(absolute, sandbox_url, log_dir, driver=os.getpid() if check is None else None)
        self.settings, self._count = config.rollout, engine_count(config)
        self.loop, self._placement, self._check = loop, placement, check
        self._stop = stop or NeverStop()
        self._places: EnginePlaces | None = None
        self._runtime: RayRuntime | None = None
        self._start: Work[None] | None = None
        self.engines: Sequence[EngineHandle] = ()
        self.version = INITIAL_VERSION
        self.failure: BaseException | None = None
        self.observers: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._update: EngineUpdate | None = None
        self._asleep: tuple[str, ...] = ()
        self._traced: list[EngineHandle] = []
        self.counts = Counter[str]()
        self._sync_s, self._counted_from = 0.0, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return self.loop.call(work, self._stop, what)

    def start(self) -> None:
        """Begin to bring up Ray and all engines, and return at once."""
        placed = self._placement
        gpus = None if placed is None else placed.engine_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
        cpus, limit = self._count * self.settings.engine.threads, self.settings.start_timeout_s
        cluster, deadline = None if self._check is None else self._spec.config.cluster, time.monotonic() + limit
        self._runtime = RayRuntime(cpus, lambda gpus: self._place(gpus, deadline), gpus, cluster, limit)
        self._start = self.loop.begin(self._bring_up(self._runtime))

    def _place(self, gpus: float, deadline: float) -> None:
        """Make the engines, once Ray is up and tells how many GPUs there are."""
        device: Device = "cuda" if gpus > 0 else "cpu"
        transport = choose_transport(self.settings.weights, self._spec.config.placement, device)
        self._spec = replace(self._spec, device=device, transport=transport).with_cache()
        if self._check is not None:
            self._places = EnginePlaces(self._spec, self._count, self._check, deadline)
        self._spec.log_dir.mkdir(parents=True, exist_ok=True)
        self.engines = [EngineHandle(index, self._spec, self._places) for index in range(self._count)]

    async def _bring_up(self, runtime: RayRuntime) -> None:
        try:
            while not runtime.is_up():
                await asyncio.sleep(_RAY_POLL_S)
        except Exception as error:
            raise EngineError(f"the rollout side did not start: {error}") from error
        self._begin(self._watch(runtime))
        for engine in self.engines:
            self._begin(self._started(engine))
        await self._until(lambda: all(engine.up for engine in self.engines))

    async def _started(self, engine: EngineHandle) -> None:
        await engine.start()
        engine.live = engine.version == self.version  # others wait for the next update
        self._notify()

    async def _watch(self, runtime: RayRuntime) -> None:
        """End the run where Ray has lost what engines need. Ray itself would wait for ever."""
        while not (lost := runtime.lost(starting=not all(engine.up for engine in self.engines))):
            await asyncio.sleep(_WATCH_S)
        self._end(lost)

    def check_start(self) -> None:
        """Raise at once what `wait_ready` is going to raise; returns while there is hope. Needs `start`."""
        if self._start is not None and self._start.done:
            self.wait_ready()

    def wait_ready(self) -> EngineFacts:
        """Block until every engine has been up; what a weight transport has to know of them.

        Raises EngineError naming what is late or failed, and where its log is; Cancelled.
        """
        if self._start is None:
            raise EngineError("the engine pool was not started")
        self._start.wait(self._stop, "the engines to start")
        return self.engines[0].facts

    def close(self) -> None:
        """Stop engines and a Ray instance of our own. Idempotent, waits seconds at most."""
        if self._runtime is None:
            return
        if self._start is not None:
            self._start.cancel()
        self.loop.call(end([*self._background, *([] if self._update is None else [self._update.task])]))
        for engine in self.engines:
            engine.kill(gently=engine.up)
        self.engines = ()
        if self._places is not None:
            self._places.close()
        self._runtime.close()
        self._runtime = None

    # Engines that die.

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it on the loop; what it raises ends the sampling."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._fail(error)

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        for observer in self.observers:
            observer()

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait for engines that start. Raises what ends the sampling."""
        while not ready():
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            await self._changed.wait()

    def _end(self, why: str) -> None:
        """Have the run save its state and stop, or, where it cannot be asked to, the sampling fail."""
        self._stop.ask(why)
        if not self._stop.is_set():
            self._fail(EngineError(why))

    def _replace(self, engine: EngineHandle, launch: int, why: object = "it died") -> None:
        """Begin a new process for an engine whose process number `launch` is lost, unless that has happened.

        Where the trainer has the GPUs it is begun when the engines wake.
        """
        if not engine.up or engine.launches != launch:
            return
        engine.kill()
        if self._stop.is_set():
            return
        self.counts["engine_restarts"] += 1
        log.warning("%s is replaced: %s; log: %s", engine.name, why, engine.log_path)
        if not self._asleep:
            self._begin(self._started(engine))
            self._check_live()

    def _check_live(self) -> None:
        tried_again = self._update is not None and self._update.led  # where one engine fails all may have failed
        if not tried_again and self.version != INITIAL_VERSION and not any(engine.live for engine in self.engines):
            why = f"no engine is left that has weights {self.version}, and those that are replaced get the next ones"
            self._end(f"{why}: start the run again with run.resume=auto; with more rollout.engines it outlives one")

    # Groups.

    async def sample(self, engine: EngineHandle, task: GroupTask) -> list[Trajectory]:
        """Sample a group on an engine; one that died is replaced. A cancelled group ends in the engine, too.

        Raises GroupFailed, whose message says why, and ValueError when the prompt leaves the model no room to answer.
        """
        size, limit = len(task.prompt.token_ids), self.settings.engine.max_model_len
        if not 0 < size < limit:
            needs = f"at least 1 and fewer than rollout.engine.max_model_len = {limit}"
            raise ValueError(f"prompt {task.prompt.id!r} has {size} tokens; it needs {needs}")
        launch, died = engine.launches, f"{engine.name} died; its log: {engine.log_path}"
        try:
            outcome = await engine.sample(task)
        except RayError as error:
            why = await engine.why(error)
            if not why:
                self._replace(engine, launch)
            raise GroupFailed(why or died) from error
        # A replaced process may still have finished a group, perhaps with half of its new weights.
        if launch != engine.launches:
            raise GroupFailed(died)
        if outcome.trajectories is None:
            self.counts.update(f"lost_{call.status}" for call in outcome.tool_calls)
            raise GroupFailed(outcome.failure)
        return outcome.trajectories

    async def check(self, engine: EngineHandle) -> None:
        """Replace an engine that no longer answers, after a group that was late."""
        launch = engine.launches
        if not await engine.responds():
            self._replace(engine, launch, "it does not answer")

    # Weights.

    def send(self, trainer: SendsWeights, version: int) -> None:
        """Give all engines the trainer's current weights as `version`, which is above 0.

        Returns when the trainer may change them; engines that fetch a copy may still be at it. Raises EngineError when
        an engine has received other weights, or no engine takes them; Cancelled; what `WeightTransport.send` raises.
        """
        self.finish_update()  # engines may still fetch the former weights, of which the next version leaves nothing
        for _ in range(_SEND_ATTEMPTS):
            message = trainer.announce(version)
            update = self._call(self._begin_update(message, version), "an engine to start")
            try:
                sums = trainer.send(version)
            except BaseException:
                self.loop.call(self._break_off())
                raise
            self.loop.do(partial(update.sums.set_result, sums))
            if not update.led:
                return
            self.finish_update()
            if any(engine.live for engine in self.engines):
                return
        raise EngineError(f"weights {version} reached no engine in {_SEND_ATTEMPTS} attempts; see their logs")

    async def _begin_update(self, message: dict[str, Any] | None, version: int) -> EngineUpdate:
        """Sample with these weights from now on. Engines that sleep wake for them, without their caches."""
        if self._asleep and not any(engine.up for engine in self.engines):
            raise EngineError("all engines died, and cannot be replaced while the trainer has the GPUs")
        await self._until(lambda: any(engine.up for engine in self.engines))
        await self._wake(WEIGHTS)
        up = [engine for engine in self.engines if engine.up]
        update = EngineUpdate(version, up, message, self.settings.weights.timeout_s)
        self.version = version
        for engine in up:
            engine.version, engine.live = version, True
        self._notify()
        update.task = asyncio.create_task(self._settled(update))
        self._update = update
        return update

    async def _settled(self, update: EngineUpdate) -> None:
        """Wait until all engines have the weights; replace those that have not."""
        sums = await update.settled()
        try:
            update.compare(sums)
        except EngineError as error:
            self._fail(error)
            raise
        self.counts.update({"sync_bytes": sum(size for size, _ in sums.values()), f"sync_by_{self._spec.transport}": 1})
        self._sync_s += update.seconds
        for engine, (launch, why) in update.failed.items():
            self._replace(engine, launch, why)

    async def _break_off(self) -> None:
        """The trainer sends nothing more of the current update."""
        if self._update is not None:
            await end([self._update.task])
        self._update = None

    @property
    def members(self) -> tuple[object, ...]:
        """The processes of the engines in the current update: changes when an engine is replaced."""
        return () if self._update is None else tuple((each.index, each.launches) for each in self._update.engines)

    def lead(
        self, method: str, arguments: Callable[[int], Any] | None = None, abort: Callable[[], None] | None = None
    ) -> list[str]:
        """Have the engines of the current update do what its transport asks; see `EngineUpdate.lead`.

        From any thread but the loop's. Where the run is to stop all engines fail. Raises nothing.
        """
        update = self._update
        if update is None:
            return []
        with suppress(Cancelled):
            self._call(update.lead(method, arguments, joined=abort is not None), f"engines in {method}")
        if abort is not None and update.failed:
            abort()
        return [f"{engine.name} (log: {engine.log_path})" for engine in update.failed]

    def finish_update(self) -> None:
        """Return when all engines have the weights of the last `send`, or are being replaced. Raises as `send`."""
        self._call(self._finish_update(), f"engines to take weights {self.version}")

    async def _finish_update(self) -> None:
        if (update := self._update) is not None:
            await asyncio.wait({update.task})  # a stop leaves it under way
            self._update = None
            update.task.result()

    # Memory that engines share with the trainer.

    @property
    def is_asleep(self) -> bool:
        """Whether a part of the engines' memory sleeps."""
        return bool(self._asleep)

    def sleep(self, level: int) -> None:
        """All engines give their GPU memory back: 1 keeps the weights in host memory, 2 keeps nothing. Idempotent.

        Raises EngineError when an engine refuses. A dead one is restarted at `wake`, when there is memory for it. When
        the stop signal is set, engines are not needed any more: those that do not sleep soon are killed.
        """
        try:
            self.wait_ready()
            return self._call(self._sleep(level, self.settings.start_timeout_s), "engines to fall asleep")
        except Cancelled:
            pass
        try:
            self.loop.call(self._sleep(level, _SLEEP_AT_STOP_S))
        except EngineError as error:
            log.warning("the engines are killed, as the trainer needs their GPUs to save: %s", error)
            for engine in self.engines:
                engine.kill()

    async def _sleep(self, level: int, limit_s: float) -> None:
        if self._asleep:
            return
        if self._stop.is_set():
            for engine in [engine for engine in self.engines if not engine.up]:
                engine.kill()
        else:
            await self._until(lambda: all(engine.up for engine in self.engines))
            await self._finish_update()
        self._asleep = (WEIGHTS, CACHE)
        await self._of_all("fall asleep", limit_s, "sleep", level)

    def wake(self) -> None:
        """All engines take their memory again and can sample. Raises EngineError when one cannot."""
        self.finish_update()
        self._call(self._wake(WEIGHTS, CACHE), "engines to wake")

    async def _wake(self, *what: str) -> None:
        """Wake the tags in `what` that are asleep, weights first."""
        if not (tags := [tag for tag in self._asleep if tag in what]):
            return
        await self._of_all(f"wake its {' and '.join(tags)}", self.settings.start_timeout_s, "wake_up", tags)
        self._asleep = tuple(tag for tag in self._asleep if tag not in tags)
        if not self._asleep:
            for engine in self.engines:
                if not engine.up:
                    self._begin(self._started(engine))
            self._check_live()

    async def _of_all(self, what: str, limit_s: float, method: str, *arguments: Any) -> None:
        """Call a method of all engines that are up; those that died are replaced. Raises EngineError."""
        up = [engine for engine in self.engines if engine.up]
        for engine, answer in (await ask_all(up, what, limit_s, method, *arguments)).items():
            if isinstance(answer, EngineDied):
                self._replace(engine, engine.launches, answer)
            elif isinstance(answer, BaseException):
                raise answer

    # Traces by vLLM's profiler, and statistics.

    def begin_trace(self, step: int) -> None:
        """Have vLLM's profiler record from now on. An engine that cannot trace is named in the log."""
        live = [engine for engine in self.engines if engine.live]
        work = self._trace(live, "begin its trace", "start_profile", step_name(step))
        self._traced = self._call(work, "engines to begin a trace")

    def end_trace(self) -> None:
        """Have the engines write what was recorded since `begin_trace`; likewise."""
        self._call(self._trace(self._traced, "write its trace", "stop_profile"), "engines to write a trace")

    async def _trace(self, engines: Sequence[EngineHandle], what: str, *call: str) -> list[EngineHandle]:
        """Call a method of these engines, by its name and arguments; returns those that have done it."""
        answers = await ask_all(engines, what, _TRACE_S, *call)
        for answer in answers.values():
            if isinstance(answer, Exception):
                log.warning("%s", answer)
        return [engine for engine, answer in answers.items() if answer is None]

    def stats(self) -> dict[str, float]:
        """Return counts and seconds since the last call, and reset them; of updates that were over by then.

        Always group_retries, late_groups, quarantined (prompts), engine_restarts, and engines_idle, the share of the
        time in which an engine has nothing to sample, mean over engines. After a sync also sync_s, sync_bytes (of one
        engine), sync_gb_per_s and sync_by_<transport> (updates). The lost_<status> are tool calls of discarded
        attempts, which appear in no trajectory.
        """
        now, idle_s = time.monotonic(), sum(engine.take_idle() for engine in self.engines)
        idle = min(1.0, idle_s / max(1e-9, (now - self._counted_from) * max(1, len(self.engines))))
        stats = pool_stats({**self.counts, "sync_s": self._sync_s, "engines_idle": idle})
        self.counts.clear()
        self._counted_from, self._sync_s = now, 0.0
        return stats
