"""The pool: all engines of a run, started, given weights, put to sleep, and replaced when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ctpo_megatron.base.event_loop import EventLoop, Work, end
from ctpo_megatron.base.ray_environment import ADDRESS
from ctpo_megatron.base.run_paths import RunPaths, step_name
from ctpo_megatron.base.stop import Cancelled, NeverStop, StopRequest
from ctpo_megatron.config import Config, ConfigError, Device, Placement, Problem, choose_transport, engine_count
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines.engine import (
    INITIAL_VERSION,
    EngineDied,
    EngineError,
    EngineSpec,
    GroupFailed,
    GroupTask,
)
from ctpo_megatron.engines.handle import EngineHandle, EngineUpdate, shut_down
from ctpo_megatron.engines.ray_runtime import NodeCheck, RayRuntime, find_places
from ctpo_megatron.engines.weights import EngineFacts, SendsWeights
from ctpo_megatron.environments import open_sandbox

T = TypeVar("T")
WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's tags of what an engine holds in GPU memory."""
_STARTS = 3
"""How often an engine is begun until it is up."""
_DEAD_NODE_S = 15.0
"""For Ray to notice that a node of a cluster is gone; until then it would begin engines there."""

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
    ray: RayRuntime | None = None,
) -> Iterator[EnginePool]:
    """Engines that load in the background, and the sandbox that they need, with their output in folder `logs`.

    check: makes what every node of a Ray cluster has to pass, where RAY_ADDRESS names one. The other arguments are as
    in `EnginePool`. Raises ConfigError, SandboxStartError.
    """
    on_cluster = bool(os.environ.get(ADDRESS))
    if not on_cluster and config.cluster.nodes > 1:
        fix = "start the run with `ctpo launch`, or Ray on every node and export RAY_ADDRESS=HOST:PORT of its head"
        raise ConfigError([Problem("cluster.nodes", "but RAY_ADDRESS names no Ray cluster", fix, config.cluster.nodes)])
    with ExitStack() as stack:
        sandbox = open_sandbox(config.sandbox, config.cluster.nodes, logs)
        url = stack.enter_context(sandbox) if config.rollout.needs_sandbox else ""
        log.info("engines: vLLM's model runner %s", config.rollout.engine.model_runner)
        where: dict[str, Any] = {"check": check()} if on_cluster else {"placement": placement}
        with EnginePool(config, url, loop, log_dir=logs, stop=stop, ray=ray, **where) as pool:
            pool.start()
            yield pool


class EnginePool(AbstractContextManager["EnginePool"]):
    """All engines of a run, on an event loop: coroutines run there, all other methods are the trainer's thread's.

    engines: the latest process of each; what earlier ones answer does not count. One that dies is followed by another,
    which gets its weights in the next update; the run ends when none is left to sample. settings: section `rollout`.
    version: of the weights that were sent last. counts: of what `stats` reports. failure: why the engines cannot
    continue. observers: are called on the loop when an engine samples that did not, and when there is a failure.
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
        ray: RayRuntime | None = None,
    ) -> None:
        """config: of the run. The engines start from `model.path`, whose weights are version 0.

        sandbox_url: base URL of the code execution service; None: every node has its own. log_dir: None: `logs` in the
        run directory. placement: whose the GPUs of this node are; None without any, or where Ray may have all.
        check: what every node of the cluster of RAY_ADDRESS has to pass; None: the engines run on this node.
        stop: ends every wait of the pool, with Cancelled. It is asked to when no engine can be replaced or none is
        left; without one the pool raises EngineError then. ray: begun by `begin_ray`; None: the pool begins its own.
        """
        log_dir = (log_dir or RunPaths(config.run.directory).logs.root).resolve()
        self._spec = EngineSpec(config, sandbox_url, log_dir, driver=os.getpid() if check is None else None)
        self.settings, self.loop, self._count = config.rollout, loop, engine_count(config)
        self._placement, self._check, self._stop = placement, check, stop or NeverStop()
        self._runtime = ray
        self._places: list[str] | None = None
        self._start: Work[EngineFacts] | None = None
        self.engines: list[EngineHandle] = []
        self.version = INITIAL_VERSION
        self.failure: BaseException | None = None
        self.observers: list[Callable[[], None]] = []
        self._starts: set[asyncio.Task[None]] = set()
        self._update: EngineUpdate | None = None
        self._asleep: tuple[str, ...] = ()
        self.counts = Counter[str]()
        self._groups = Counter[int]()  # that are sampled on each engine
        self._busy_s = self._sync_s = 0.0
        self._counted_from = self._counted_to = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return self.loop.call(work, self._stop, what)

    def start(self) -> None:
        """Begin to bring up Ray and all engines, and return at once."""
        placed = self._placement
        gpus = None if placed is None else placed.engine_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
        cluster = None if self._check is None else self._spec.config.cluster
        self._runtime = self._runtime or RayRuntime(self._count * self.settings.engine.threads, gpus, cluster)
        self._runtime.lost.add_done_callback(lambda lost: self.loop.do(partial(self._end, lost.result())))
        self._start = self.loop.begin(self._bring_up(self._runtime))

    async def _bring_up(self, runtime: RayRuntime) -> EngineFacts:
        deadline = asyncio.get_running_loop().time() + self.settings.start_timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                device: Device = "cuda" if await asyncio.wrap_future(runtime.started) > 0 else "cpu"
            transport = choose_transport(self.settings.weights, self._spec.config.placement, device)
            self._spec = replace(self._spec, device=device, transport=transport).with_cache()
            if self._check is not None:
                self._places = await find_places(self._spec, self._count, self._check, deadline)
        except TimeoutError:
            logs = runtime.folder or "in the folder of its node on this machine"
            raise EngineError(f"Ray is not up in time (rollout.start_timeout_s); its logs: {logs}") from None
        except Exception as error:
            raise EngineError(f"the rollout side did not start: {error}") from error
        self._spec.log_dir.mkdir(parents=True, exist_ok=True)
        return await self._begin_all()

    async def _begin_all(self) -> EngineFacts:
        self.engines = [self._new(index) for index in range(self._count)]
        await asyncio.gather(*map(self._begin, self.engines))
        return next(engine.facts for engine in self.engines if engine.facts is not None)

    def check_start(self) -> None:
        """Raise at once what `wait_ready` is going to raise; returns while there is hope."""
        if self._start is not None and self._start.done:
            self.wait_ready()

    def wait_ready(self) -> EngineFacts:
        """Block until every engine has been up; what a weight transport has to know of them.

        Raises EngineError naming what is late or failed, and where its log is; Cancelled.
        """
        assert self._start is not None  # `start` comes first
        return self._start.wait(self._stop, "the engines to start")

    def close(self) -> None:
        """Stop engines and a Ray instance of our own. Idempotent, waits seconds at most."""
        if self._runtime is None:
            return
        if self._start is not None:
            self._start.cancel()
        self.loop.call(end([*self._starts, *([] if self._update is None else [self._update.task])]))
        shut_down(self.engines)
        self._runtime.close()
        self._runtime = None

    # Engines that start, and die.

    def _new(self, index: int) -> EngineHandle:
        return EngineHandle(index, self._spec, None if self._places is None else self._places[index])

    def _begin(self, engine: EngineHandle) -> asyncio.Task[None]:
        """Begin the process of an engine; one that cannot be brought up ends the sampling."""

        def begun(task: asyncio.Task[None]) -> None:
            self._starts.discard(task)
            self._notify(None if task.cancelled() else task.exception())

        task = asyncio.create_task(self._started(engine))
        self._starts.add(task)
        task.add_done_callback(begun)
        return task

    async def _started(self, engine: EngineHandle) -> None:
        """Bring an engine up. A process that dies meanwhile is followed by another."""
        for left in reversed(range(_STARTS)):
            self.engines[engine.index] = engine
            try:
                await engine.start()
            except EngineDied as error:
                if not left:
                    raise EngineError(str(error)) from error
                log.warning("%s; it is begun again", error)
                await asyncio.sleep(0 if self._places is None else _DEAD_NODE_S)
                engine = self._new(engine.index)
            else:
                if self.version == INITIAL_VERSION:  # else it waits for the next update
                    engine.version = INITIAL_VERSION
                return

    def _notify(self, failure: BaseException | None = None) -> None:
        """Tell the observers. failure: ends the sampling."""
        self.failure = self.failure or failure
        for observer in self.observers:
            observer()

    def _end(self, why: str) -> None:
        """Have the run save its state and stop, or, where it cannot be asked to, the sampling fail."""
        self._stop.ask(why)
        if not self._stop.is_set():
            self._notify(EngineError(why))

    def _replace(self, engine: EngineHandle, why: object = "it died") -> None:
        """Have another process follow one that is lost, unless that has happened.

        Where the trainer has the GPUs it is begun when the engines wake.
        """
        if not engine.up:
            return
        replaced = f"{engine.name} is replaced: {why}; log: {engine.log_path}"
        engine.end()
        if self._stop.is_set():
            return
        self.counts["engine_restarts"] += 1
        log.warning("%s", replaced)
        self.engines[engine.index] = successor = self._new(engine.index)
        if not self._asleep:
            self._begin(successor)
            self._check_live()

    def _check_live(self) -> None:
        tried_again = self._update is not None and self._update.led  # where one engine fails all may have failed
        if not tried_again and self.version != INITIAL_VERSION and not any(engine.live for engine in self.engines):
            why = f"no engine is left that has weights {self.version}, and those that are replaced get the next ones"
            self._end(f"{why}: start the run again with run.resume=auto; with more rollout.engines it outlives one")

    # Groups.

    async def sample(self, engine: EngineHandle, task: GroupTask) -> list[Trajectory]:
        """Sample a group on an engine; one that died is replaced. A cancelled group ends in the engine, too.

        Raises GroupFailed, whose message says why.
        """
        self._count_groups(engine.index, 1)
        try:
            trajectories = await engine.sample(task)
        except EngineDied as error:
            self._replace(engine)
            raise GroupFailed(str(error)) from error
        except GroupFailed as failed:
            self.counts.update(f"lost_{status}" for status in failed.lost_calls)
            raise
        finally:
            self._count_groups(engine.index, -1)
        if not engine.up:  # it was killed, perhaps with half of its new weights
            raise GroupFailed(f"{engine.name} was replaced meanwhile")
        return trajectories

    async def check(self, engine: EngineHandle) -> None:
        """Replace an engine that no longer answers, after a group that was late."""
        if not await engine.responds():
            self._replace(engine, "it does not answer")

    # Weights.

    def send(self, trainer: SendsWeights, version: int) -> None:
        """Give all engines the trainer's current weights as `version`, which is above 0.

        Returns when the trainer may change them; engines that fetch a copy may still be at it. Raises EngineError when
        an engine has received other weights, or no engine takes them; Cancelled; what `WeightTransport.send` raises.
        """
        self.finish_update()  # engines may still fetch the former weights, of which the next version leaves nothing
        for _ in range(2):  # once more where no engine has taken them
            message = trainer.announce(version)
            update = self._call(self._begin_update(message, version), "an engine to start")
            try:
                sums = trainer.send(version)
            except BaseException:
                self.loop.call(end([update.task]))
                self._update = None
                raise
            self.loop.do(partial(update.sums.set_result, sums))
            if not update.led:
                return
            self.finish_update()
            if any(engine.live for engine in self.engines):
                return
        raise EngineError(f"weights {version} reached no engine in 2 attempts; see their logs")

    async def _begin_update(self, message: dict[str, Any] | None, version: int) -> EngineUpdate:
        """Sample with these weights from now on. Engines that sleep wake for them, without their caches."""
        while not any(engine.up for engine in self.engines):
            if self._stop.is_set():
                raise Cancelled("stop requested")
            if self.failure is not None or not self._starts:
                why = "all engines died, and cannot be replaced while the trainer has the GPUs"
                raise self.failure or EngineError(why)
            await asyncio.wait(self._starts, return_when=asyncio.FIRST_COMPLETED)
        await self._wake(WEIGHTS)
        up = [engine for engine in self.engines if engine.up]
        self._update = update = EngineUpdate(version, up, led=message is None)
        self.version = version
        for engine in up:
            engine.version = version
        self._notify()
        update.task = asyncio.create_task(self._settled(update, message))
        return update

    async def _settled(self, update: EngineUpdate, message: dict[str, Any] | None) -> None:
        """Wait until all engines have the weights. message: by which they fetch them; None: they are led."""
        if message is not None:
            steps = ("start_weight_update",), ("receive_weights", message), ("finish_weight_update", update.version)
            await self._tell(update, lambda _: steps)
        sums = await update.sums
        try:
            update.compare(sums)
        except EngineError as error:
            self._notify(error)
            raise
        self.counts.update({"sync_bytes": sum(size for size, _ in sums.values()), f"sync_by_{self._spec.transport}": 1})
        self._sync_s += update.seconds

    async def _tell(
        self, update: EngineUpdate, steps: Callable[[int], Sequence[tuple[Any, ...]]], *, joined: bool = False
    ) -> None:
        """Have the engines of an update take steps of it, and replace those that fail.

        steps: methods of engine number n, with their arguments; the last of an update returns the sums of what has
        arrived, of each worker. joined: an engine that fails leaves the others waiting, so that all are replaced.
        """

        async def tell(number: int, engine: EngineHandle) -> None:
            what, limit_s = f"take weights {update.version}", self.settings.weights.timeout_s
            try:
                for step in steps(number):
                    update.received[engine] = await engine.ask(what, limit_s, *step, key="rollout.weights.timeout_s")
            except (EngineDied, EngineError) as error:
                self._replace(engine, error)
                if joined:
                    raise

        try:
            async with asyncio.TaskGroup() as calls:
                for number, engine in enumerate(update.engines):
                    if engine.up:
                        calls.create_task(tell(number, engine))
        except* (EngineDied, EngineError):
            for engine in update.engines:
                self._replace(engine, "its transfer was aborted, as another engine failed")
        update.seconds = time.monotonic() - update.began

    @property
    def members(self) -> Sequence[EngineHandle]:
        """The engines in the current update: others when one was replaced."""
        return () if self._update is None else self._update.engines

    def lead(
        self,
        method: str,
        arguments: Callable[[int], Sequence[Any]] = lambda _: (),
        abort: Callable[[], None] | None = None,
    ) -> list[str]:
        """Have the engines of the current update do what its transport asks; see `_tell`.

        Returns those that have failed in this update. abort: is called when there are some; the others fail then, too.
        From any thread but the loop's. Where the run is to stop all engines fail. Raises nothing.
        """
        update = self._update
        assert update is not None  # it is called within `send`
        told = self._tell(update, lambda number: [(method, *arguments(number))], joined=abort is not None)
        try:
            self._call(told, f"engines in {method}")
        except Cancelled:
            for engine in update.engines:
                engine.end()
        failed = [f"{engine.name} (log: {engine.log_path})" for engine in update.engines if not engine.up]
        if abort is not None and failed:
            abort()
        return failed

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
        """Release the GPU memory of all engines: 1 keeps the weights in host memory, 2 keeps nothing. Idempotent.

        Raises EngineError when an engine refuses. A dead one is restarted at `wake`, when there is memory for it. When
        the run is to stop, engines are not needed any more: they are killed.
        """
        try:
            self.wait_ready()
            self._call(self._sleep(level), "engines to fall asleep")
        except Cancelled:
            self.loop.call(end(self._starts))
            shut_down(self.engines)

    async def _sleep(self, level: int) -> None:
        if not self._asleep:
            await asyncio.gather(*self._starts)
            await self._finish_update()
            self._asleep = (WEIGHTS, CACHE)
            await self._all("fall asleep", "sleep", level)

    def wake(self) -> None:
        """Let all engines allocate their memory again, so that they can sample. Raises EngineError when one cannot."""
        self.finish_update()
        self._call(self._wake(WEIGHTS, CACHE), "engines to wake")

    async def _wake(self, *what: str) -> None:
        """Wake the tags in `what` that are asleep, weights first. With the last one engines that died are replaced."""
        if not (tags := [tag for tag in self._asleep if tag in what]):
            return
        await self._all(f"wake its {' and '.join(tags)}", "wake_up", tags)
        self._asleep = tuple(tag for tag in self._asleep if tag not in tags)
        if not self._asleep:
            for engine in [engine for engine in self.engines if not engine.up]:
                self._begin(engine)
            self._check_live()

    async def _all(self, what: str, method: str, *arguments: Any, optional: bool = False) -> None:
        """Call a method of all engines that are up. Replaces those that died; raises or logs what refuses."""

        async def one(engine: EngineHandle) -> None:
            try:
                await engine.ask(what, self.settings.start_timeout_s, method, *arguments)
            except EngineDied as error:
                self._replace(engine, error)
            except EngineError as error:
                if not optional:
                    raise
                log.warning("%s", error)

        await asyncio.gather(*(one(engine) for engine in self.engines if engine.up))

    # Traces by vLLM's profiler, and statistics.

    def begin_trace(self, step: int) -> None:
        """Have vLLM's profiler record from now on. An engine that cannot trace is named in the log."""
        begin = self._all("begin its trace", "start_profile", step_name(step), optional=True)
        self._call(begin, "engines to begin a trace")

    def end_trace(self) -> None:
        """Have the engines write what was recorded since `begin_trace`; likewise."""
        self._call(self._all("write its trace", "stop_profile", optional=True), "engines to write a trace")

    def _count_groups(self, index: int, change: int) -> None:
        """Add to the time in which engines sample; from now on one of them samples more groups, or fewer."""
        now = time.monotonic()
        self._busy_s += (now - self._counted_to) * sum(groups > 0 for groups in self._groups.values())
        self._counted_to = now
        self._groups[index] += change

    def stats(self) -> dict[str, float]:
        """Return counts and seconds since the last call, and reset them; of updates that were over by then.

        Always engines_idle, the share of the time in which an engine has nothing to sample, mean over engines, and
        sync_s. What occurred: group_retries, quarantined (prompts), engine_restarts, sync_bytes (of one engine) and
        sync_by_<transport> (updates). The lost_<status> are tool calls of discarded attempts, which appear in no
        trajectory.
        """
        self._count_groups(0, 0)
        seconds = max(1e-9, self._counted_to - self._counted_from) * self._count
        stats = {**self.counts, "sync_s": self._sync_s, "engines_idle": 1.0 - self._busy_s / seconds}
        self.counts.clear()
        self._counted_from, self._sync_s, self._busy_s = self._counted_to, 0.0, 0.0
        return stats
