"""The pool: all engines of a run, started, given weights, put to sleep, and replaced when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from ray.exceptions import RayError

from ctpo_megatron.base.event_loop import EventLoop, Work, end
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.stop import Cancelled, NeverStop, StopRequest
from ctpo_megatron.config import (
    Config,
    Device,
    Placement,
    choose_transport,
    engine_count,
)
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines.cluster import EngineGroup, RayCluster
from ctpo_megatron.engines.handle import EngineHandle
from ctpo_megatron.engines.ray_runtime import RayRuntime
from ctpo_megatron.engines.stats import PoolStats
from ctpo_megatron.engines.tasks import (
    INITIAL_VERSION,
    EngineDied,
    EngineError,
    EngineSpec,
    GroupFailed,
    GroupTask,
)
from ctpo_megatron.engines.traces import EngineTraces
from ctpo_megatron.engines.updates import CallArguments, EngineUpdate
from ctpo_megatron.engines.weights import EngineFacts, SendsWeights

T = TypeVar("T")
WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's tags of what an engine holds in GPU memory."""
_CLOSE_S = 20.0
"""For a start that is under way to end when the pool closes."""
_START_MARGIN_S = 5.0
"""The pool waits so much longer for Ray than Ray's own deadline, whose error names the cause."""
_SLEEP_AT_STOP_S = 10.0
"""For engines to free their GPUs when the run is to stop."""
_RAY_POLL_S, _WATCH_S = 0.05, 1.0
"""How often Ray's start is checked, and whether its processes live."""
_SEND_ATTEMPTS = 2
"""To send weights that no engine has taken."""

log = logging.getLogger(__name__)


class EnginePool:
    """All engines of a run, on an event loop: coroutines run there, all other methods are the trainer's thread's.

    An engine that died is started again, and gets its weights in the next update; the run ends when none is left to
    sample. loop: that loop. settings: section `rollout`. counts: of what `stats` reports. version: of the weights that
    engines have. failure: why the engines cannot continue.

    config: the whole run configuration. The engines start from `model.path`, whose weights are version 0; `run.seed` is
    part of every sampling seed.
    sandbox_url: base URL of the code execution service; None: every node has its own. log_dir: None: `logs` in the run
    directory. placement: whose the GPUs of this node are; None without any, or where Ray may have all. cluster: of
    RAY_ADDRESS, where the engines run; None: they run on this node.
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
        cluster: RayCluster | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        log_dir = (log_dir or RunPaths(config.run.directory).logs.root).resolve()
        # Absolute, as engines may run in other folders.
        model = config.model.model_copy(update={"path": str(Path(config.model.path).absolute())})
        run = config.run.model_copy(update={"root": str(Path(config.run.root).absolute())})
        absolute = config.model_copy(update={"model": model, "run": run})
        self._spec = EngineSpec(absolute, sandbox_url, log_dir, driver=None if cluster else os.getpid())
        self.settings, self._count = config.rollout, engine_count(config)
        self.loop, self._placement, self._cluster = loop, placement, cluster
        self._stop = stop or NeverStop()
        self._group: EngineGroup | None = None
        self._runtime: RayRuntime | None = None
        self._start: Work[None] | None = None
        self.engines: Sequence[EngineHandle] = ()
        self.version = INITIAL_VERSION
        self.failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._current: EngineUpdate | None = None
        self._update: asyncio.Task[None] | None = None
        self._asleep: tuple[str, ...] = ()
        self._dead: list[EngineHandle] = []
        self._traces = EngineTraces()
        self._stats = PoolStats()
        self.counts, self.note_load = self._stats.counts, self._stats.note_load

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return self.loop.call(work, self._stop, what)

    def start(self) -> None:
        """Begin to bring up Ray and all engines, and return at once."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = None if self._placement is None else self._placement.engine_devices(visible)
        cpus, limit = self._count * self.settings.engine.threads, self.settings.start_timeout_s
        deadline = time.monotonic() + limit
        self._runtime = RayRuntime(cpus, lambda gpus: self._place(gpus, deadline), gpus, self._cluster, limit)
        self._start = self.loop.begin(self._bring_up(self._runtime, deadline + _START_MARGIN_S))

    def _place(self, gpus: float, deadline: float) -> None:
        """Make the engines, once Ray is up and tells how many GPUs there are."""
        device: Device = "cuda" if gpus > 0 else "cpu"
        config = self._spec.config
        transport = choose_transport(config.rollout.weights, config.placement, device)
        self._spec = replace(self._spec, device=device, transport=transport).with_cache()
        if self._cluster is not None:
            self._group = EngineGroup(self._spec, self._count, self._cluster, deadline)
            self._spec = self._group.spec
        self.engines = [EngineHandle(index, self._spec, self._group) for index in range(self._count)]

    async def _bring_up(self, runtime: RayRuntime, deadline: float) -> None:
        try:
            while not runtime.is_up(deadline):
                await asyncio.sleep(_RAY_POLL_S)
        except Exception as error:
            raise EngineError(f"the rollout side did not start: {error}") from error
        watch = self._begin(self._watch(runtime))
        starts = [asyncio.create_task(self._started(engine)) for engine in self.engines]
        try:
            up: asyncio.Future[Any] = asyncio.gather(*starts)
            waiting: set[asyncio.Future[Any]] = {up, watch}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                raise self.failure or Cancelled("Ray has lost what engines need")
            await up
        finally:
            await end(starts)

    async def _started(self, engine: EngineHandle) -> None:
        try:
            await engine.start()
        except EngineError as error:
            lost = self._runtime.lost if self._runtime is not None else ""
            raise self._end(f"{engine.name} cannot start, as {lost}") if lost else error from None
        engine.live = engine.version == self.version  # others wait for the next update
        self._changed.set()

    async def _watch(self, runtime: RayRuntime) -> None:
        """End the run where Ray has lost what engines need. Ray itself would wait for ever."""
        while True:
            await asyncio.sleep(_WATCH_S)
            starting = [engine for engine in self.engines if not engine.up and not engine.seated]
            if lost := runtime.head_lost:
                raise self._end(lost)
            if starting and (lost := runtime.lost):
                raise self._end(f"{starting[0].name} cannot start, as {lost}")

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
        with suppress(Exception):  # `wait_ready` raises why a start failed
            self._runtime.wait(_CLOSE_S)
        if self._start is not None:
            self._start.cancel()
        self.loop.call(end([*self._background, *([] if self._update is None else [self._update])]))
        for engine in self.engines:
            engine.kill(gently=engine.up)
        self.engines = ()
        if self._group is not None:
            self._group.close()
            self._group = None
        self._runtime.close()
        self._runtime = None

    # Engines that die.

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it on the loop; what it raises, but for Cancelled, ends the sampling."""

        async def run() -> None:
            try:
                await work
            except Cancelled:
                return
            except Exception as error:
                self._fail(error)

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._changed.set()

    def _end(self, why: str) -> Exception:
        """Have the run save its state and stop, where it can; what to raise."""
        self._stop.ask(why)
        if self._stop.is_set():
            return Cancelled(why)
        self._fail(error := EngineError(why))
        return error

    def _lost(self, engine: EngineHandle, why: object, *, later: bool = False) -> None:
        """Begin a new process for an engine; later: when the engines wake, as the trainer has the GPUs."""
        engine.kill()
        if self._stop.is_set():
            return
        if self._runtime is not None and (lost := self._runtime.lost):
            self._end(f"{engine.name} cannot be replaced ({why}), as {lost}")
            return
        self.counts["engine_restarts"] += 1
        log.warning("%s is replaced: %s; log: %s", engine.name, why, engine.log_path)
        if later or self._asleep:
            self._dead.append(engine)
        else:
            self._begin(self._started(engine))

    def _check_live(self) -> None:
        if self.version != INITIAL_VERSION and not self._asleep and not any(engine.live for engine in self.engines):
            why = f"no engine is left that has weights {self.version}, and those that are replaced get the next ones"
            self._end(f"{why}: start the run again with run.resume=auto; with more rollout.engines it outlives one")

    async def changed(self) -> None:
        """Wait until an engine serves that did not. Raises what ends the sampling, also of earlier."""
        if self.failure is None:
            await self._changed.wait()
            self._changed.clear()
        if self.failure is not None:
            raise self.failure

    # Groups.

    async def sample(self, engine: EngineHandle, task: GroupTask) -> list[Trajectory]:
        """Sample a group on an engine; one that died is replaced. A cancelled group ends in the engine, too.

        Raises GroupFailed, whose message says why.
        """
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

    def _replace(self, engine: EngineHandle, launch: int, why: object = "it died") -> None:
        """Replace a process of an engine, unless that has happened."""
        if engine.up and engine.launches == launch:
            self._lost(engine, why)
            self._check_live()

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError when `prompt` leaves the model no room to answer."""
        limit = self.settings.engine.max_model_len
        if not 0 < len(prompt.token_ids) < limit:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens; it needs at least 1 and fewer than "
                f"rollout.engine.max_model_len = {limit}"
            )

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
                self.loop.call(self._break_off(update))
                raise
            self.loop.do(partial(update.sums.set_result, sums))
            if message is not None:
                return
            self.finish_update()
            if any(engine.live for engine in self.engines):
                return
        raise EngineError(f"weights {version} reached no engine in {_SEND_ATTEMPTS} attempts; see their logs")

    async def _begin_update(self, message: dict[str, Any] | None, version: int) -> EngineUpdate:
        """Sample with these weights from now on. Engines that sleep wake for them, without their caches."""
        while not (up := [engine for engine in self.engines if engine.up]):
            if self._asleep:
                raise EngineError("all engines died, and cannot be replaced while the trainer has the GPUs")
            await self.changed()
        await self._wake(WEIGHTS)
        update = EngineUpdate(version, up, message, self.settings.weights.timeout_s)
        self.version = version
        for engine in up:
            engine.version, engine.live = version, True
        self._changed.set()
        self._current, self._update = update, asyncio.create_task(self._settled(update))
        return update

    async def _settled(self, update: EngineUpdate) -> None:
        """Wait until all engines have the weights; replace those that have not."""
        sums = await update.settled()
        try:
            update.compare(sums)
        except EngineError as error:
            self._fail(error)
            raise
        self._stats.add_update(self._spec.transport, sum(size for size, _ in sums.values()), update.seconds)
        for engine, (launch, why) in update.failed.items():
            if engine.up and engine.launches == launch:  # otherwise it has been replaced meanwhile
                self._lost(engine, why)
        if not update.led:
            self._check_live()

    async def _break_off(self, update: EngineUpdate) -> None:
        """The trainer sends nothing more of an update."""
        await update.close()
        if self._update is not None:
            await end([self._update])
        self._update = None

    @property
    def members(self) -> tuple[object, ...]:
        """The processes of the engines in the current update: changes when an engine is replaced."""
        return () if self._current is None else tuple(engine.ready_ref for engine in self._current.engines)

    def lead(
        self, method: str, arguments: CallArguments | None = None, abort: Callable[[], None] | None = None
    ) -> list[str]:
        """Have the engines of the current update do what its transport asks; see `EngineUpdate.lead`.

        From any thread but the loop's. Where the run is to stop all engines fail. Raises nothing.
        """
        update = self._current
        if update is None:
            return []
        try:
            return self._call(update.lead(method, arguments, abort), f"engines in {method}")
        except Cancelled as cancelled:
            self.loop.call(update.give_up(update.engines, str(cancelled)))
        if abort is not None:
            abort()
        return [engine.name for engine in update.engines]

    def finish_update(self) -> None:
        """Return when all engines have the weights of the last `send`, or are being replaced. Raises as `send`."""
        self._call(self._finish_update(), f"engines to take weights {self.version}")

    async def _finish_update(self) -> None:
        if self._update is not None:
            try:
                await asyncio.shield(self._update)
            finally:
                self._update = None if self._update.done() else self._update

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
            for engine in self.engines:
                if not engine.up:
                    engine.kill()
        else:
            while any(not engine.up for engine in self.engines):
                await self.changed()
            await self._finish_update()
        await self._of_all([(engine, engine.sleep(level, limit_s)) for engine in self.engines if engine.up])
        self._asleep = (WEIGHTS, CACHE)

    def wake(self) -> None:
        """All engines take their memory again and can sample. Raises EngineError when one cannot."""
        self.finish_update()
        self._call(self._wake(WEIGHTS, CACHE), "engines to wake")

    async def _wake(self, *what: str) -> None:
        """Wake the tags in `what` that are asleep, weights first."""
        if not (tags := [tag for tag in self._asleep if tag in what]):
            return
        awake = [engine for engine in self.engines if engine.up]
        await self._of_all([(engine, engine.wake(tags, self.settings.start_timeout_s)) for engine in awake])
        self._asleep = tuple(tag for tag in self._asleep if tag not in tags)
        if not self._asleep:
            dead, self._dead = self._dead, []
            for engine in dead:
                self._begin(self._started(engine))
            self._check_live()

    async def _of_all(self, calls: Sequence[tuple[EngineHandle, Coroutine[Any, Any, None]]]) -> None:
        """Await the calls of all engines; those that died are killed. Raises EngineError."""
        results = await asyncio.gather(*(call for _, call in calls), return_exceptions=True)
        for (engine, _), result in zip(calls, results, strict=True):
            if isinstance(result, EngineDied):
                self._lost(engine, result, later=True)
            elif result is not None:
                raise result

    # Traces by vLLM's profiler, and statistics.

    def begin_trace(self, step: int) -> None:
        """Have vLLM's profiler record from now on; see `EngineTraces`."""
        live = [engine for engine in self.engines if engine.live]
        self._call(self._traces.begin(live, step), "engines to begin a trace")

    def end_trace(self) -> None:
        """Have the engines write what was recorded since `begin_trace`; likewise."""
        self._call(self._traces.end(), "engines to write a trace")

    def stats(self) -> dict[str, float]:
        """See `PoolStats.take`; of updates that were over by then."""
        return self._stats.take(len(self.engines))
