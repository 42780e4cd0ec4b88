"""The pool: all engines of a run, started, given weights, put to sleep, and replaced when they die."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from ctpo_megatron.base.run_paths import LogPaths, RunPaths
from ctpo_megatron.config import ClusterConfig, Config, Placement, engine_count
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.engines.group import EngineGroup
from ctpo_megatron.engines.handle import EngineHandle
from ctpo_megatron.engines.occupancy import Occupancy
from ctpo_megatron.engines.ray_runtime import RayRuntime
from ctpo_megatron.engines.sleep import CACHE, WEIGHTS, SleepState
from ctpo_megatron.engines.stats import UPDATES_BY, pool_stats
from ctpo_megatron.engines.tasks import (
    Device,
    EngineSpec,
    FleetError,
    Transport,
    WeightSyncError,
    choose_transport,
)
from ctpo_megatron.engines.updates import PendingUpdate, ReadBack, check_complete
from ctpo_megatron.engines.weights import EngineFacts, EngineWeights
from ctpo_megatron.engines.weights.file import FileWeights

if TYPE_CHECKING:
    import torch

_CLOSE_TIMEOUT_S = 20.0
_MARGIN_S = 5.0  # the runtime has the same deadline, and knows better what it waits for


class EnginePool:
    """All engines of a run. One thread starts and closes it; several may sample, each by a `Scheduler` of its own.

    lock: re-entrant; while it is held nothing is submitted, and no engine is replaced or registered.
    settings: section `rollout`. load: groups in flight by engine, of all schedulers. counts: of what `stats` reports.
    occupancy: trajectories in flight over time. The four are used under the lock.

    config: the whole run configuration (rollout, sandbox, model and run sections are used).
    model_path: Hugging Face directory the engines start from; its weights carry version 0.
    run_seed: part of every sampling seed.
    sandbox_url: base URL of the code execution service; None: every node has its own.
    placement: whose the GPUs of this node are; None without any, or where Ray may have all.
    cluster: of RAY_ADDRESS, where the engines run; None: they run on this node.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        run_seed: int,
        sandbox_url: str | None,
        *,
        log_dir: Path | None = None,
        placement: Placement | None = None,
        cluster: ClusterConfig | None = None,
    ) -> None:
        log_dir = (log_dir or RunPaths(config.run.directory).logs.folder).resolve()
        self._spec = EngineSpec(config, str(Path(model_path).absolute()), run_seed, sandbox_url, log_dir)
        self.settings, self._count = config.rollout, engine_count(config)
        self._placement = placement
        self._cluster = cluster
        self._group: EngineGroup | None = None
        self._runtime: RayRuntime | None = None
        self._started_at = 0.0
        self._engines: list[EngineHandle] = []
        self._memory = SleepState(config.rollout.start_timeout_s)
        self._weights: EngineWeights | None = None
        self._update: PendingUpdate | None = None
        self._facts: EngineFacts | None = None
        self._read_back = ReadBack()
        self._parks = False
        self.counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self.load: Counter[int] = Counter()
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
        transport = choose_transport(self._spec.config, device, cluster=self._cluster is not None)
        self._spec = replace(self._spec, device=device, transport=transport)
        if self._cluster is not None:
            deadline = self._started_at + self.settings.start_timeout_s
            self._group = EngineGroup(self._spec, self._count, self._cluster, deadline)
            self._spec = self._group.spec
        self._engines = [EngineHandle(index, self._spec, self._group) for index in range(self._count)]

    def wait_ready(self) -> None:
        """Block until every engine serves. Raises FleetError naming what is late or failed, and where its log is."""
        self._await_runtime()
        with self.lock:
            for engine in self._engines:
                self._await_start(engine)

    def _await_runtime(self) -> None:
        if self._runtime is None:
            raise FleetError("the fleet was not started")
        limit = self.settings.start_timeout_s
        try:
            self._runtime.wait(max(0.0, self._started_at + limit + _MARGIN_S - time.monotonic()))
        except Exception as error:
            raise FleetError(f"the rollout side did not start: {error}") from error

    def _await_one(self) -> None:
        """Block until an engine serves; those that still start get the current weights when they are up."""
        self._await_runtime()
        with self.lock:
            while not any(engine.live for engine in self._engines):
                late = min(engine.deadline for engine in self._engines) - time.monotonic()
                ray.wait([engine.ready_ref for engine in self._engines], timeout=max(0.0, late))
                self.register_started()

    def check_start(self) -> None:
        """Raise at once what `wait_ready` is going to raise; returns while there is hope. Needs `start`."""
        if self._runtime is not None and self._runtime.is_up():
            with self.lock:
                self.register_started()

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError when `prompt` leaves the model no room to answer."""
        limit = self.settings.engine.max_model_len
        if not 0 < len(prompt.token_ids) < limit:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens; it needs at least 1 and fewer than "
                f"rollout.engine.max_model_len = {limit}"
            )

    @property
    def transport(self) -> Transport:
        """What carries weights to these engines; waits until they are up."""
        self.wait_ready()
        return self._spec.transport

    def engine_facts(self) -> EngineFacts:
        """What a weight transport has to know of the engines; the first call waits until they are up."""
        if self._facts is None:
            self.wait_ready()
            self._facts = self._engines[0].facts
        return self._facts

    def sync(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Give all engines these weights: `begin_sync`, then `finish_update`."""
        self.begin_sync(named_tensors, version)
        self.finish_update()

    def begin_sync(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Begin to give all engines these weights (Hugging Face names, full shapes) by a file; see `begin_update`."""
        dtype, began = self.engine_facts().dtype, time.monotonic()
        self.begin_update(FileWeights(named_tensors, version, dtype), began)

    def begin_update(self, weights: EngineWeights, began: float) -> None:
        """All engines that serve begin to take these weights, of a version >= 0, which are closed with the next ones.

        What is submitted from now on is played with them. Waits until one serves, and for an update before this one.
        Engines that sleep wake for their weights; their caches sleep on. began: when the weights began to be made, on
        the monotonic clock. Raises WeightSyncError when a tensor of the model is missing: engines would silently keep
        the old one.
        """
        self.finish_update()
        self._await_one()
        try:
            check_complete(weights, self._spec.model_path)
        except WeightSyncError:
            weights.close()
            raise
        if self._weights is not None:
            self._weights.close()
        self._weights = weights
        self._memory.wake(self._engines, WEIGHTS)
        serving = [engine for engine in self._memory.living(self._engines) if engine.live]
        self._update = PendingUpdate(weights, serving, began)

    def finish_update(self) -> None:
        """Return when all engines have the weights of the last `begin_update`. One that died or is late is replaced;
        the new one gets them when it is up, which nobody waits for here.

        Whoever plays groups in turns does it as soon as there is nothing to wait for. Raises WeightSyncError when an
        engine answers with another version or keeps other values.
        """
        with self.lock:
            update, self._update = self._update, None
            if update is None:
                return
            failed, unchecked, seconds = update.finish()
            self._memory.dead += failed
            if not self._memory.asleep:
                self._replace_dead()
            self._count_update(unchecked, seconds, update.weights.size)

    def _count_update(self, unchecked: list[str], seconds: float, size: int) -> None:
        self._read_back.note(unchecked)
        self._seconds["sync_s"] = self._seconds.get("sync_s", 0.0) + seconds
        self.counts.update({"sync_bytes": size, f"{UPDATES_BY}{self._spec.transport}": 1})

    @property
    def engines(self) -> Sequence[EngineHandle]:
        """All of them, for a transport that leads their update itself."""
        return self._engines

    def begin_transfer(self) -> None:
        """A transport that keeps no copy of the weights gives them to the engines: replaced ones wait for the next."""
        self.wait_ready()
        self._parks = True
        self._memory.wake(self._engines, WEIGHTS)

    def end_transfer(self, failed: Sequence[EngineHandle], unchecked: list[str], began: float, size: int) -> None:
        """The others serve with the new weights, those that failed are replaced. Raises FleetError if they cannot."""
        if failed and self._memory.asleep:
            names = ", ".join(engine.name for engine in failed)
            raise FleetError(f"{names} failed in an update, and cannot be replaced while the trainer has the GPUs")
        self._memory.dead += failed
        self._revive()
        for engine in self._engines:
            if engine not in failed:
                engine.admit()
        self._count_update(unchecked, time.monotonic() - began, size)

    def sleep(self, level: int) -> None:
        """All engines give their GPU memory back: 1 keeps the weights in host memory, 2 keeps nothing. Idempotent.

        Raises FleetError when an engine refuses. A dead one is restarted at `wake`, when there is memory for it.
        """
        self.wait_ready()
        self.finish_update()
        self._memory.sleep(self._engines, level)

    def wake(self) -> None:
        """All engines take their memory again and can sample. Raises FleetError when one cannot."""
        self.finish_update()
        self._memory.wake(self._engines, WEIGHTS, CACHE)
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

    def note_occupancy(self) -> None:
        """Record what the engines have in flight, if it has changed."""
        self.occupancy.note(len(self._engines))

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the last call, then reset; of updates that were over by then.

        group_retries, late_groups, quarantined (prompts), engine_restarts; sync_s, sync_bytes (of one engine), and
        their rate sync_gb_per_s and sync_by_<transport> (updates) where there was a sync; lost_<status>: tool calls of
        attempts that were thrown away, which therefore appear in no trajectory.
        """
        with self.lock:
            stats = pool_stats({**self.counts, **self._seconds})
            self.counts.clear()
            self._seconds.clear()
        return stats

    def close(self) -> None:
        """Stop engines and a Ray instance of our own; release the weights. Idempotent, waits seconds at most."""
        if self._runtime is not None:
            with suppress(Exception):  # a start that failed was reported to whoever waited for it
                self._runtime.wait(_CLOSE_TIMEOUT_S)
        for engine in self._engines:
            engine.kill(gently=engine.live)
        self._engines = []
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    def restart(self, engine: EngineHandle) -> None:
        """Begin a new process for an engine."""
        self.counts["engine_restarts"] += 1
        engine.kill()
        engine.launch()

    def register_started(self) -> None:
        """Finish an update that is over, and register restarted engines that are up.

        Raises FleetError when one failed or is late, and as `finish_update`.
        """
        if self._update is not None and self._update.is_over:
            self.finish_update()
        for engine in self._engines:
            if engine.starting and (ray.wait([engine.ready_ref], timeout=0)[0] or engine.deadline <= time.monotonic()):
                self._register(engine, 0.0)

    def _await_start(self, engine: EngineHandle) -> None:
        while engine.starting:
            self._register(engine, max(0.0, engine.deadline - time.monotonic()))

    def _register(self, engine: EngineHandle, timeout_s: float) -> None:
        ready, _ = ray.wait([engine.ready_ref], timeout=timeout_s)
        if not ready:
            limit = self.settings.start_timeout_s
            late = f"{engine.name} is not up after {limit:g} s (rollout.start_timeout_s)"
            raise FleetError(f"{late}; {engine.waits_for()}")
        engine.register(self._weights, park=self._parks)
