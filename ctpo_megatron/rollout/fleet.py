"""The rollout fleet: prompts in, complete groups of trajectories out, whatever happens to an engine on the way."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from ctpo_megatron.config import ClusterConfig, Config, Placement, engine_count
from ctpo_megatron.data.records import Group, Prompt
from ctpo_megatron.rollout.dispatch import Dispatcher, Request, check_prompt
from ctpo_megatron.rollout.engine_group import EngineGroup
from ctpo_megatron.rollout.handle import EngineHandle, engine_died
from ctpo_megatron.rollout.metrics import fleet_stats
from ctpo_megatron.rollout.quarantine import Quarantine, Quarantined
from ctpo_megatron.rollout.ray_runtime import RayRuntime
from ctpo_megatron.rollout.sleep import CACHE, WEIGHTS, SleepState
from ctpo_megatron.rollout.tasks import EngineSpec, FleetError, Sampling, WeightSyncError
from ctpo_megatron.weights.shared_file import WeightSnapshot, checkpoint_names

if TYPE_CHECKING:
    import torch

_CLOSE_TIMEOUT_S = 20.0
_MARGIN_S = 5.0  # the runtime has the same deadline, and knows better what it waits for


class RolloutFleet:
    """All engines of a run. Not thread-safe: one thread starts it, uses it, and outlives it.

    config: the whole run configuration (rollout, sandbox, model and run sections are used).
    model_path: Hugging Face directory the engines start from; its weights carry version 0.
    run_seed: part of every sampling seed.
    sandbox_url: base URL of the code execution service; None: every node has its own.
    placement: whose the GPUs of this node are; None without any, or where Ray may have all.
    finished: called when a group is complete.
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
        finished: Callable[[], None] = lambda: None,
        cluster: ClusterConfig | None = None,
    ) -> None:
        log_dir = (log_dir or config.run.directory / "logs").resolve()
        self._spec = EngineSpec(config, str(Path(model_path).absolute()), run_seed, sandbox_url, log_dir)
        self._rollout, self._count = config.rollout, engine_count(config)
        self._placement, self._finished = placement, finished
        self._cluster = cluster
        self._group: EngineGroup | None = None
        self._runtime: RayRuntime | None = None
        self._started_at = 0.0
        self._engines: list[EngineHandle] = []
        self._memory = SleepState(config.rollout.start_timeout_s)
        self._quarantine = Quarantine(config.rollout.max_quarantined)
        self._snapshot: WeightSnapshot | None = None
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def __enter__(self) -> RolloutFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to bring up Ray and all engines, and return at once."""
        self._started_at = time.monotonic()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = None if self._placement is None else self._placement.engine_devices(visible)
        cpus, limit = self._count * self._rollout.engine.threads, self._rollout.start_timeout_s
        self._runtime = RayRuntime(cpus, self._launch, gpus, self._cluster, limit)

    def _launch(self, gpus: float) -> None:
        spec = replace(self._spec, device="cuda" if gpus > 0 else "cpu")
        if self._cluster is not None:
            deadline = self._started_at + self._rollout.start_timeout_s
            self._group = EngineGroup(spec, self._count, self._cluster, deadline)
            spec = self._group.spec
        self._engines = [EngineHandle(index, spec, self._group) for index in range(self._count)]

    def wait_ready(self) -> None:
        """Block until every engine serves. Raises FleetError naming what is late or failed, and where its log is."""
        if self._runtime is None:
            raise FleetError("the fleet was not started")
        limit = self._rollout.start_timeout_s
        try:
            self._runtime.wait(max(0.0, self._started_at + limit + _MARGIN_S - time.monotonic()))
        except Exception as error:
            raise FleetError(f"the rollout side did not start: {error}") from error
        for engine in self._engines:
            if not engine.live:
                self._await_start(engine)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        samples: int,
        sampling: Sampling,
        cancelled: Callable[[], bool] = lambda: False,
        replacement: Callable[[], Prompt] | None = None,
    ) -> list[Group]:
        """Play `samples` episodes for every prompt; the groups come back in the order of `prompts`.

        A prompt whose group fails more than `rollout.max_group_retries` times is quarantined: `replacement()` gives
        the prompt that takes its place, or without `replacement` the group is left out. So is a prompt that was
        quarantined before. `replacement` must be an endless stream over the prompts, each once an epoch.

        Raises ValueError before anything is sampled when a prompt leaves no room to answer, TooManyQuarantined beyond
        `rollout.max_quarantined`, FleetError when an engine cannot be restarted, Cancelled once `cancelled()` is true.
        """
        for prompt in prompts:
            check_prompt(prompt, self._rollout)
        self.wait_ready()
        started = time.monotonic()
        dispatcher = Dispatcher(
            self._rollout,
            self._engines,
            self._quarantine,
            self._counts,
            restart=self._restart,
            readmit=self._readmit,
            finished=self._finished,
        )
        groups = dispatcher.run(prompts, Request(step, samples, sampling, cancelled, replacement))
        self._add_seconds("generate_s", started)
        return groups

    @property
    def quarantined(self) -> list[Quarantined]:
        """The run's quarantined prompts, oldest first; a resumed run adds those that it had before."""
        return self._quarantine.records

    def sync(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Give all engines these weights (Hugging Face names and full shapes) and hold them to `version` (>= 0).

        An engine found dead is restarted with the new weights. Engines that sleep wake for their weights; their caches
        sleep on. Raises WeightSyncError when a tensor of the model is missing (engines would silently keep the old one)
        or an engine answers with another version or other values, FleetError when one cannot be restarted.
        """
        self.wait_ready()
        started = time.monotonic()
        snapshot = WeightSnapshot(named_tensors, version)
        missing = checkpoint_names(self._spec.model_path) - snapshot.names - {"lm_head.weight"}  # absent when tied
        if missing:
            snapshot.close()
            raise WeightSyncError(f"weights {version} lack {len(missing)} tensors, e.g. {sorted(missing)[:3]}")
        if self._snapshot is not None:
            self._snapshot.close()
        self._snapshot = snapshot
        self._memory.wake(self._engines, WEIGHTS)
        with snapshot.published() as path:
            references = [(engine, engine.begin_update(path, version)) for engine in self._memory.living(self._engines)]
            for engine, reference in references:
                try:
                    engine.check_update(reference, version)
                except RayError as error:
                    if not engine_died(error):
                        raise WeightSyncError(f"{engine.name}: {error}; log: {engine.log_path}") from error
                    self._memory.dead.append(engine)
        if not self._memory.asleep:
            self._revive()
        self._add_seconds("sync_s", started)

    def sleep(self, level: int) -> None:
        """All engines give their GPU memory back: 1 keeps the weights in host memory, 2 keeps nothing. Idempotent.

        Raises FleetError when an engine refuses. A dead one is restarted at `wake`, when there is memory for it.
        """
        self.wait_ready()
        self._memory.sleep(self._engines, level)

    def wake(self) -> None:
        """All engines take their memory again and can sample. Raises FleetError when one cannot."""
        self._memory.wake(self._engines, WEIGHTS, CACHE)
        self._revive()

    def _revive(self) -> None:
        for engine in self._memory.dead:
            self._restart(engine)
        for engine in self._memory.dead:
            self._await_start(engine)
        self._memory.dead.clear()

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the last call, then reset.

        group_retries, quarantined (prompts), engine_restarts, generate_s, sync_s; and lost_<status>: tool calls made
        by attempts that were thrown away, which therefore appear in no trajectory.
        """
        stats = fleet_stats({**self._counts, **self._seconds})
        self._counts.clear()
        self._seconds.clear()
        return stats

    def _add_seconds(self, name: str, started: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started

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
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    def _restart(self, engine: EngineHandle) -> None:
        self._counts["engine_restarts"] += 1
        engine.kill()
        engine.launch()

    def _readmit(self) -> None:
        """Register restarted engines that are up; raises FleetError when one failed or is late."""
        for engine in self._engines:
            if not engine.live and (ray.wait([engine.ready_ref], timeout=0)[0] or engine.deadline <= time.monotonic()):
                self._register(engine, 0.0)

    def _await_start(self, engine: EngineHandle) -> None:
        while not engine.live:
            self._register(engine, max(0.0, engine.deadline - time.monotonic()))

    def _register(self, engine: EngineHandle, timeout_s: float) -> None:
        ready, _ = ray.wait([engine.ready_ref], timeout=timeout_s)
        if not ready:
            limit = self._rollout.start_timeout_s
            late = f"{engine.name} is not up after {limit:g} s (rollout.start_timeout_s)"
            raise FleetError(f"{late}; {engine.waits_for()}")
        engine.register(self._snapshot)
