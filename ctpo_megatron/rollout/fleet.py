"""The rollout fleet: prompts in, complete groups of trajectories out, whatever happens to an engine on the way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from ctpo_megatron.config.schema import Config
from ctpo_megatron.data.records import Group, Prompt
from ctpo_megatron.rollout.dispatch import Dispatcher
from ctpo_megatron.rollout.handle import EngineHandle, FleetError, WeightSyncError, engine_died
from ctpo_megatron.rollout.metrics import fleet_stats
from ctpo_megatron.rollout.ray_runtime import RayRuntime
from ctpo_megatron.rollout.tasks import Device, GroupTask, Sampling, ToolFactory
from ctpo_megatron.weights.shared_file import WeightSnapshot, checkpoint_names

if TYPE_CHECKING:
    import torch

_CLOSE_TIMEOUT_S = 20.0


class RolloutFleet:
    """All engines of a run. Not thread-safe: one thread starts it, uses it, and outlives it.

    config: the whole run configuration (rollout, sandbox, model and run sections are used).
    model_path: Hugging Face directory the engines start from; its weights carry version 0.
    run_seed: part of every sampling seed.
    sandbox_url: base URL of the code execution service.
    tool_factory: replaces the sandbox; called once in each engine process, returns `async run_tool(code)`.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        run_seed: int,
        sandbox_url: str,
        *,
        log_dir: Path | None = None,
        tool_factory: ToolFactory | None = None,
    ) -> None:
        self._config, self._model_path, self._run_seed, self._sandbox_url = config, model_path, run_seed, sandbox_url
        self._log_dir = (log_dir or config.run.directory / "logs").resolve()
        self._tool_factory = tool_factory
        self._runtime: RayRuntime | None = None
        self._begun = 0.0
        self._slots: list[EngineHandle] = []
        self._snapshot: WeightSnapshot | None = None
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> RolloutFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to bring up Ray and all engines, and return at once."""
        rollout = self._config.rollout
        self._begun = time.monotonic()
        self._runtime = RayRuntime(rollout.engines * rollout.engine.threads, self._launch)

    def _launch(self, gpus: float) -> None:
        device: Device = "cuda" if gpus > 0 else "cpu"
        self._slots = [
            EngineHandle(
                index,
                self._config,
                self._model_path,
                self._run_seed,
                self._sandbox_url,
                device,
                self._log_dir / f"rollout_engine_{index}.log",
                self._tool_factory,
            )
            for index in range(self._config.rollout.engines)
        ]

    def wait_ready(self) -> None:
        """Block until every engine serves. Raises FleetError naming what is late or failed, and where its log is."""
        if self._runtime is None:
            raise FleetError("the fleet was not started")
        limit = self._config.rollout.start_timeout_s
        try:
            self._runtime.wait(max(0.0, self._begun + limit - time.monotonic()))
        except Exception as error:
            raise FleetError(f"the rollout side did not start: {error}") from error
        for slot in self._slots:
            if not slot.live:
                self._await_start(slot)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        samples: int,
        sampling: Sampling,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Group]:
        """Play `samples` episodes for every prompt; the groups come back in the order of `prompts`.

        Raises ValueError before anything is sampled when a prompt leaves no room to answer, GroupFailed when a group
        fails more than `rollout.max_group_retries` times, FleetError when an engine cannot be restarted, Cancelled once
        `cancelled()` is true.
        """
        self._check_prompts(prompts)
        self.wait_ready()
        started = time.monotonic()
        tasks = [GroupTask(prompt.id, prompt.token_ids, step, samples, sampling) for prompt in prompts]
        dispatcher = Dispatcher(self._config.rollout, self._slots, self._counts, self._restart, self._revive, cancelled)
        results = dispatcher.run(tasks)
        self._counts["generate_s"] += time.monotonic() - started
        return [Group(prompt, trajectories) for prompt, trajectories in zip(prompts, results, strict=True)]

    def sync(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Give all engines these weights (Hugging Face names and full shapes) and hold them to `version` (>= 0).

        An engine found dead is restarted with the new weights. Raises WeightSyncError when a tensor of the model is
        missing (engines would silently keep the old one) or an engine answers with another version or other values,
        FleetError when one cannot be restarted.
        """
        self.wait_ready()
        started = time.monotonic()
        snapshot = WeightSnapshot(named_tensors, version)
        missing = checkpoint_names(self._model_path) - snapshot.names - {"lm_head.weight"}  # absent when tied
        if missing:
            snapshot.close()
            raise WeightSyncError(f"weights {version} lack {len(missing)} tensors, e.g. {sorted(missing)[:3]}")
        if self._snapshot is not None:
            self._snapshot.close()
        self._snapshot = snapshot
        dead: list[EngineHandle] = []
        with snapshot.published() as path:
            references = [(slot, slot.begin_update(path, version)) for slot in self._slots]
            for slot, reference in references:
                try:
                    slot.check_update(reference, version)
                except RayError as error:
                    if not engine_died(error):
                        raise WeightSyncError(f"{slot.name}: {error}; log: {slot.log_path}") from error
                    dead.append(slot)
        for slot in dead:
            self._restart(slot)
        for slot in dead:
            self._await_start(slot)
        self._counts["sync_s"] += time.monotonic() - started

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the last call, then reset.

        group_retries, engine_restarts, generate_s, sync_s; and lost_<status>: tool calls made by attempts that were
        thrown away, which therefore appear in no trajectory.
        """
        counts, self._counts = self._counts, Counter()
        return fleet_stats(counts)

    def close(self) -> None:
        """Stop engines and a Ray instance of our own; release the weights. Idempotent, waits seconds at most."""
        if self._runtime is not None:
            with suppress(Exception):  # a start that failed was reported to whoever waited for it
                self._runtime.wait(_CLOSE_TIMEOUT_S)
        for slot in self._slots:
            slot.kill(gently=slot.live)
        self._slots = []
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    def _check_prompts(self, prompts: Sequence[Prompt]) -> None:
        limit = self._config.rollout.engine.max_model_len
        for prompt in prompts:
            if not 0 < len(prompt.token_ids) < limit:
                raise ValueError(
                    f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens; it needs at least 1 and fewer than "
                    f"rollout.engine.max_model_len = {limit}"
                )

    def _restart(self, slot: EngineHandle) -> None:
        self._counts["engine_restarts"] += 1
        slot.kill()
        slot.launch()

    def _revive(self) -> None:
        """Admit restarted engines that are up; raises FleetError when one failed or is late."""
        for slot in self._slots:
            if not slot.live and (ray.wait([slot.ready_ref], timeout=0)[0] or slot.deadline <= time.monotonic()):
                self._await_start(slot)

    def _await_start(self, slot: EngineHandle) -> None:
        remaining = max(0.0, slot.deadline - time.monotonic())
        ready, _ = ray.wait([slot.ready_ref], timeout=remaining)
        if not ready:
            limit = self._config.rollout.start_timeout_s
            where = f"log: {slot.log_path}" if slot.log_path.exists() else f"Ray found no place for {slot.needs}"
            raise FleetError(f"{slot.name} is not up after {limit:g} s (rollout.start_timeout_s); {where}")
        slot.admit(self._snapshot)
