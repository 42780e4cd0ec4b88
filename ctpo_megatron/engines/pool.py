"""The pool: all engines of a run, started, given weights, put to sleep, and replaced when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from ctpo_megatron.base.run_paths import LogPaths, RunPaths
from ctpo_megatron.base.stop import Cancelled, NeverStop, StopRequest, stop_poll
from ctpo_megatron.config import (
    ClusterConfig,
    Config,
    CpuCache,
    Device,
    Placement,
    choose_transport,
    engine_count,
    free_memory,
    spec_for,
)
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines.cluster import EngineGroup
from ctpo_megatron.engines.handle import EngineHandle, engine_died
from ctpo_megatron.engines.ray_runtime import RayRuntime
from ctpo_megatron.engines.sleep import CACHE, WEIGHTS, SleepState
from ctpo_megatron.engines.stats import UPDATES_BY, Occupancy, pool_stats
from ctpo_megatron.engines.tasks import EngineError, EngineSpec, GroupFailed, GroupOutcome, GroupTask
from ctpo_megatron.engines.timeouts import POOL_CLOSE_S, SEND_ATTEMPTS, SLEEP_AT_STOP_S, START_MARGIN_S
from ctpo_megatron.engines.traces import Traces
from ctpo_megatron.engines.updates import PendingUpdate, ReadBack, UpdateResult, check_complete
from ctpo_megatron.engines.weights import EngineFacts, OffersWeights, WeightOffer

log = logging.getLogger(__name__)


class EnginePool:
    """All engines of a run. One thread starts and closes it and sends weights; a `GroupSampler` samples, on a loop.

    lock: re-entrant; while it is held no engine is replaced or registered. settings: section `rollout`. counts: of what
    `stats` reports. occupancy: trajectories in flight over time.

    config: the whole run configuration. The engines start from `model.path`, whose weights are version 0; `run.seed` is
    part of every sampling seed.
    sandbox_url: base URL of the code execution service; None: every node has its own.
    log_dir: None: `logs` in the run directory.
    placement: whose the GPUs of this node are; None without any, or where Ray may have all.
    cluster: of RAY_ADDRESS, where the engines run; None: they run on this node.
    stop: ends every wait of the pool, with Cancelled. It is asked to when Ray has lost what engines need; without one
    the pool raises EngineError then.
    """

    def __init__(
        self,
        config: Config,
        sandbox_url: str | None,
        *,
        log_dir: Path | None = None,
        placement: Placement | None = None,
        cluster: ClusterConfig | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        log_dir = (log_dir or RunPaths(config.run.directory).logs.root).resolve()
        # Absolute, as engines may run in other folders.
        model = config.model.model_copy(update={"path": str(Path(config.model.path).absolute())})
        run = config.run.model_copy(update={"root": str(Path(config.run.root).absolute())})
        absolute = config.model_copy(update={"model": model, "run": run})
        self._spec = EngineSpec(absolute, sandbox_url, log_dir, driver=None if cluster else os.getpid())
        self.settings, self._count = config.rollout, engine_count(config)
        self._placement = placement
        self._cluster = cluster
        self._stop = stop or NeverStop()
        self._group: EngineGroup | None = None
        self._runtime: RayRuntime | None = None
        self._started_at = 0.0
        self._engines: list[EngineHandle] = []
        self._memory = SleepState(config.rollout.start_timeout_s)
        self._offer: WeightOffer | None = None
        self._update: PendingUpdate | None = None
        self._read_back = ReadBack()
        self._traces = Traces()
        self.counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self.occupancy = Occupancy(LogPaths(log_dir).occupancy)
        self.lock = threading.RLock()

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to bring up Ray and all engines, and return at once."""
        self._started_at = time.monotonic()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = None if self._placement is None else self._placement.engine_devices(visible)
        cpus, limit = self._count * self.settings.engine.threads, self.settings.start_timeout_s
        self._runtime = RayRuntime(cpus, self._launch, gpus, self._cluster, limit)

    def _launch(self, gpus: float) -> None:
        device: Device = "cuda" if gpus > 0 else "cpu"
        config, in_cluster = self._spec.config, self._cluster is not None
        if device == "cpu" and config.rollout.engine.kv_cache_mb is None:
            config = _with_cache(config)
        transport = choose_transport(config.rollout.weights, config.placement, device, cluster=in_cluster)
        self._spec = replace(self._spec, config=config, device=device, transport=transport)
        if self._cluster is not None:
            deadline = self._started_at + self.settings.start_timeout_s
            self._group = EngineGroup(self._spec, self._count, self._cluster, deadline)
            self._spec = self._group.spec
        self._engines = [EngineHandle(index, self._spec, self._group) for index in range(self._count)]

    def wait_ready(self) -> EngineFacts:
        """Block until every engine is up; what a weight transport has to know of them.

        Raises EngineError naming what is late or failed, and where its log is; Cancelled.
        """
        self._await_runtime()
        with self.lock:
            for engine in self._engines:
                self._await_start(engine)
            return self._engines[0].facts

    def _await_runtime(self) -> None:
        if self._runtime is None:
            raise EngineError("the engine pool was not started")
        limit = self._started_at + self.settings.start_timeout_s + START_MARGIN_S
        try:
            self._runtime.wait(max(0.0, limit - time.monotonic()), self._stop)
        except Cancelled:
            raise
        except Exception as error:
            raise EngineError(f"the rollout side did not start: {error}") from error

    def _await_one(self) -> None:
        """Block until an engine is up. It has the weights of its model directory then, and no others."""
        self._await_runtime()
        with self.lock:
            while not any(engine.live for engine in self._engines):
                first = min(engine.deadline for engine in self._engines)
                pause_s = stop_poll(first, self._stop, "an engine to start")
                ray.wait([engine.ready_ref for engine in self._engines], timeout=pause_s)
                for engine in self._engines:
                    if self._is_started(engine) and engine.take_start():
                        engine.admit()

    def check_start(self) -> None:
        """Raise at once what `wait_ready` is going to raise; returns while there is hope. Needs `start`."""
        if self._runtime is not None and self._runtime.is_up():
            with self.lock:
                self.register_started()

    async def sample(self, engine: EngineHandle, task: GroupTask) -> list[Trajectory]:
        """Sample a group on an engine; one that died is replaced. A cancelled group ends in the engine, too.

        Raises GroupFailed, whose message says why, and EngineError when the engine cannot be replaced.
        """
        launch, reference = engine.launches, engine.submit(task)
        died = f"{engine.name} died; its log: {engine.log_path}"
        try:
            outcome: GroupOutcome = await reference
        except asyncio.CancelledError:
            ray.cancel(reference, force=False)
            raise
        except RayError as error:
            raise GroupFailed(await asyncio.to_thread(self._cause, engine, launch, error) or died) from error
        # A replaced process may still have finished a group, perhaps with half of its new weights.
        if launch != engine.launches:
            raise GroupFailed(died)
        if outcome.trajectories is None:
            self.counts.update(f"lost_{call.status}" for call in outcome.tool_calls)
            raise GroupFailed(outcome.failure)
        return outcome.trajectories

    def _cause(self, engine: EngineHandle, launch: int, error: RayError) -> str:
        """Why a call failed; "" when the engine died, which is restarted then."""
        if not engine_died(error):
            cause = error.cause if isinstance(error, RayTaskError) else error
            what = str(cause) if isinstance(cause, GroupFailed) else repr(cause)
            return f"{what} on {engine.name}; its log: {engine.log_path}"
        with self.lock:
            if not engine.live or engine.launches != launch:
                return ""
            if isinstance(error, ActorUnavailableError) and engine.responds():
                return f"the connection to {engine.name} broke"
            self.restart(engine)
        return ""

    async def check(self, engine: EngineHandle) -> None:
        """Replace an engine that no longer answers, after a group that was late."""
        await asyncio.to_thread(self._check, engine)

    def _check(self, engine: EngineHandle) -> None:
        with self.lock:
            if engine.live and not engine.responds():
                self.restart(engine)

    async def tend(self) -> None:
        """Finish an update that is over, and let engines serve that are up again.

        Raises EngineError when an engine failed or is late, Ray's GCS is gone, or no engine gets weights any more; and
        as `finish_update`.
        """
        lost = self._runtime is not None and self._runtime.head_lost
        if lost or self._update is not None or not all(engine.live for engine in self._engines):
            await asyncio.to_thread(self._tend)
        self.occupancy.note(len(self._engines))

    def _tend(self) -> None:
        with self.lock:
            if self._stop.is_set():  # also because an engine cannot be replaced: the run saves its state now
                return
            if all(engine.parked for engine in self._engines):
                raise EngineError(
                    "all engines died and were replaced, and get weights only with the next update "
                    f"(rollout.weights.transport: {self.settings.weights.transport}): restart the run with "
                    "run.resume=auto"
                )
            self.register_started()

    def note_load(self, index: int, samples: int) -> None:
        """Record that an engine samples more trajectories, or fewer."""
        self.occupancy.add(index, samples)
        self.occupancy.note(len(self._engines))

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError when `prompt` leaves the model no room to answer."""
        limit = self.settings.engine.max_model_len
        if not 0 < len(prompt.token_ids) < limit:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens; it needs at least 1 and fewer than "
                f"rollout.engine.max_model_len = {limit}"
            )

    @property
    def engines(self) -> Sequence[EngineHandle]:
        """All of them."""
        return self._engines

    def send(self, trainer: OffersWeights, version: int) -> None:
        """Give all engines the trainer's current weights as `version`: an offer, its `update`, its transfer.

        Returns when the trainer may change them; engines that take a copy may still be at it. An offer of which nothing
        is kept is sent once more to engines that were replaced. Raises as `update`, and EngineError when these fail
        again.
        """
        self.finish_update()  # engines may still fetch the former weights, of which the next offer leaves nothing
        offer = trainer.offer(version)
        for _ in range(SEND_ATTEMPTS):
            self.update(offer)
            trainer.transfer()
            if offer.kept or self.finish_update():
                return
        raise EngineError(f"weights {version} did not reach all engines in {SEND_ATTEMPTS} attempts; see their logs")

    def update(self, offer: WeightOffer) -> PendingUpdate:
        """Begin to give all engines the weights of an offer, of a version >= 0, which is closed with the next one.

        What is submitted from now on is sampled with them. Waits for an update before this one, and until an engine
        serves, or all of them for an offer that is not kept. Engines that sleep wake for their weights; their caches
        sleep on. Raises EngineError when a tensor of the model is missing: engines would silently keep the old one.
        """
        with self.lock:
            try:
                self.finish_update()
                check_complete(offer, self._spec.model_path)
                if offer.kept:
                    self._await_one()
                else:
                    self.wait_ready()
            except BaseException:
                offer.close()  # no later update or `close` would: it is not yet the pool's
                raise
            # Not earlier: an engine that comes up during the wait above is given the former offer.
            if self._offer is not None and self._offer is not offer:
                self._offer.close()
            self._offer = offer
            self._memory.wake(self._engines, self._stop, WEIGHTS)
            living = self._memory.living(self._engines)
            taking = [engine for engine in living if engine.live or not offer.kept]
            self._update = PendingUpdate(offer, taking, self._stop)
            return self._update

    def finish_update(self) -> bool:
        """Return when all engines have the weights of the last `update`: whether none had to be replaced.

        A new engine is given a kept offer when it is up, which is not waited for here; it waits for the next offer
        where nothing is kept. `tend` calls this as soon as there is nothing to wait for. Raises EngineError when an
        engine reports another version or other values, or cannot be replaced; Cancelled.
        """
        with self.lock:
            if self._update is None:
                return True
            self._update.wait()  # may raise Cancelled: the update is still pending then
            update, self._update = self._update, None
            result = update.finish()
            self._count_update(update.offer, result)
            if result.failed and self._stop.is_set():
                raise Cancelled(f"stop requested while weights {update.offer.version} were sent")
            self._memory.dead += result.failed
            if update.offer.kept:
                if not self._memory.asleep:  # a new process needs GPU memory that the trainer has: `wake` replaces it
                    self._replace_dead()
            else:
                self._settle_transfer(update)
            return not result.failed

    def _settle_transfer(self, update: PendingUpdate) -> None:
        """Replaced engines are up again, and the others serve."""
        if update.failed and self._memory.asleep:
            names = ", ".join(engine.name for engine in update.failed)
            raise EngineError(f"{names} failed in an update, and cannot be replaced while the trainer has the GPUs")
        self._revive()
        for engine in update.engines:
            if engine not in update.failed:
                engine.admit()

    def _count_update(self, offer: WeightOffer, result: UpdateResult) -> None:
        self._read_back.note(result.unchecked)
        self._seconds["sync_s"] = self._seconds.get("sync_s", 0.0) + result.seconds
        self.counts.update({"sync_bytes": offer.size, f"{UPDATES_BY}{self._spec.transport}": 1})

    @property
    def is_asleep(self) -> bool:
        """Whether the engines, or a part of their memory, sleep."""
        return bool(self._memory.asleep)

    def sleep(self, level: int) -> None:
        """All engines give their GPU memory back: 1 keeps the weights in host memory, 2 keeps nothing. Idempotent.

        Raises EngineError when an engine refuses. A dead one is restarted at `wake`, when there is memory for it. When
        the stop signal is set, engines are not needed any more: those that do not sleep soon are killed.
        """
        try:
            self.wait_ready()
            self.finish_update()
            self._memory.sleep(self._engines, level, self._stop)
        except Cancelled:
            self._sleep_or_end(level)

    def _sleep_or_end(self, level: int) -> None:
        """Have the GPU memory back whatever the engines do."""
        try:
            self._memory.sleep(self._engines, level, NeverStop(), SLEEP_AT_STOP_S)
        except EngineError as error:
            log.warning("the engines are killed, as the trainer needs their GPUs to save: %s", error)
            for engine in self._engines:
                engine.kill()

    def wake(self) -> None:
        """All engines take their memory again and can sample. Raises EngineError when one cannot."""
        self.finish_update()
        self._memory.wake(self._engines, self._stop, WEIGHTS, CACHE)
        self._revive()

    def _revive(self) -> None:
        for engine in self._replace_dead():
            self._await_start(engine)

    def _replace_dead(self) -> list[EngineHandle]:
        """Begin a new process for each; returns which."""
        dead, self._memory.dead = self._memory.dead, []
        for engine in dead:
            self.restart(engine)
        return dead

    def begin_trace(self, step: int) -> None:
        """Have vLLM's profiler record from now on. An engine that cannot is named in the log."""
        with self.lock:
            live = [engine for engine in self._engines if engine.live]
        self._traces = Traces(live, step)  # without the lock: groups are submitted meanwhile

    def end_trace(self) -> None:
        """Have the engines write what was recorded since `begin_trace`; likewise."""
        self._traces.end()

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the last call, then reset; of updates that were over by then.

        Always group_retries, late_groups, quarantined (prompts) and engine_restarts. After a sync also sync_s,
        sync_bytes (of one engine), sync_gb_per_s and sync_by_<transport> (updates). The lost_<status> are tool calls of
        discarded attempts, which appear in no trajectory.
        """
        with self.lock:
            stats = pool_stats({**self.counts, **self._seconds})
            self.counts.clear()
            self._seconds.clear()
        return stats

    def close(self) -> None:
        """Stop engines and a Ray instance of our own; release the weights. Idempotent, waits seconds at most."""
        if self._runtime is not None:
            with suppress(Exception):  # `wait_ready` raises why a start failed
                self._runtime.wait(POOL_CLOSE_S)
        for engine in self._engines:
            engine.kill(gently=engine.live)
        self._engines = []
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._offer is not None:
            self._offer.close()
            self._offer = None
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    def restart(self, engine: EngineHandle, why: object = "it died") -> None:
        """Begin a new process for an engine. Raises EngineError, or has the run stop, where Ray cannot start one."""
        engine.kill()
        if self._runtime is not None and (lost := self._runtime.lost):
            engine.park()
            return self._end(f"{engine.name} cannot be replaced ({why}), as {lost}")
        self.counts["engine_restarts"] += 1
        log.warning("%s is replaced: %s; log: %s", engine.name, why, engine.log_path)
        engine.launch()

    def _end(self, why: str) -> None:
        self._stop.ask(why)
        if not self._stop.is_set():
            raise EngineError(why)

    def register_started(self) -> None:
        """Finish an update that is over, and register restarted engines that are up.

        Raises EngineError when one failed or is late, or Ray's GCS is gone, and as `finish_update`.
        """
        if self._runtime is not None and (lost := self._runtime.head_lost):
            return self._end(lost)
        if self._update is not None and self._update.is_over:
            self.finish_update()
        for engine in self._engines:
            if engine.starting and self._is_started(engine):
                self._register(engine)

    def _await_start(self, engine: EngineHandle) -> None:
        while engine.starting:
            if self._is_started(engine):
                self._register(engine)
            else:
                ray.wait([engine.ready_ref], timeout=stop_poll(engine.deadline, self._stop, f"{engine.name} to start"))

    def _is_started(self, engine: EngineHandle) -> bool:
        """Whether its process has started, or failed. Raises EngineError when it is late."""
        if not engine.starting:
            return False
        if ray.wait([engine.ready_ref], timeout=0)[0]:
            return True
        if self._runtime is not None and (lost := self._runtime.lost) and not engine.seated:
            self._end(f"{engine.name} cannot start, as {lost}")
        if engine.deadline <= time.monotonic():
            limit = f"{self.settings.start_timeout_s:g} s (rollout.start_timeout_s)"
            raise EngineError(f"{engine.name} is not up after {limit}; {engine.waits_for()}")
        return False

    def _register(self, engine: EngineHandle) -> None:
        """Let an engine whose process has started serve, with the weights of the offer that is kept."""
        offer = self._offer
        if not engine.take_start():
            return
        if offer is None:
            engine.admit()
        elif not offer.kept:
            engine.park()
        else:
            update = PendingUpdate(offer, [engine], self._stop)
            update.wait()
            if failed := update.finish().failed:
                engine.retry_start(failed[engine])
            else:
                engine.admit()


def _with_cache(config: Config) -> Config:
    """With the size of an engine's KV cache on this CPU, which it logs."""
    cache = CpuCache.of(config, spec_for(config), free_memory())
    log.info("engines: a KV cache of %d MiB each (rollout.engine.kv_cache_mb; %s)", cache.mb, cache)
    engine = config.rollout.engine.model_copy(update={"kv_cache_mb": cache.mb})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
