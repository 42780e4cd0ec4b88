"""The rollout fleet: prompts in, complete groups of trajectories out, whatever happens to an engine on the way."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from ctpo_megatron.config.schema import Config
from ctpo_megatron.data.records import Group, Prompt
from ctpo_megatron.rollout.engine import Device, GroupOutcome, GroupTask, Sampling, ToolFactory
from ctpo_megatron.rollout.metrics import TOOL_STATUSES
from ctpo_megatron.rollout.ray_runtime import RayRuntime
from ctpo_megatron.rollout.slot import EngineSlot, FleetError, WeightSyncError, engine_died
from ctpo_megatron.rollout.weights import WeightSnapshot, checkpoint_names

if TYPE_CHECKING:
    import torch

_MAX_BACKOFF_S = 10.0
_CLOSE_TIMEOUT_S = 20.0


class GroupFailed(FleetError):
    """A group could not be completed within its retries."""


@dataclass(slots=True)
class _Job:
    """One prompt on its way: its place in the answer, how often it failed, and when it may be tried again."""

    index: int
    task: GroupTask
    failures: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class _Flight:
    job: _Job
    slot: EngineSlot
    deadline: float


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
        self._slots: list[EngineSlot] = []
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
            EngineSlot(
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

    def generate(self, prompts: Sequence[Prompt], *, step: int, samples: int, sampling: Sampling) -> list[Group]:
        """Play `samples` episodes for every prompt; the groups come back in the order of `prompts`.

        Raises ValueError before anything is sampled when a prompt leaves no room to answer, GroupFailed when a group
        fails more than `rollout.max_group_retries` times, FleetError when an engine cannot be restarted.
        """
        self._check_prompts(prompts)
        self.wait_ready()
        started = time.monotonic()
        tasks = (GroupTask(prompt.id, prompt.token_ids, step, samples, sampling) for prompt in prompts)
        waiting = deque(_Job(index, task) for index, task in enumerate(tasks))
        flights: dict[Any, _Flight] = {}
        done: dict[int, Group] = {}
        try:
            while len(done) < len(prompts):
                self._dispatch(waiting, flights, samples)
                for reference in self._wait(waiting, flights):
                    self._land(reference, flights, waiting, prompts, done)
                self._revive()
                self._expire(flights, waiting)
        finally:
            for reference in flights:  # only on an error: leave nothing running behind
                ray.cancel(reference, force=False)
        self._counts["generate_s"] += time.monotonic() - started
        return [done[index] for index in range(len(prompts))]

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
        dead: list[tuple[EngineSlot, BaseException]] = []
        with snapshot.published() as path:
            references = [(slot, slot.begin_update(path, version)) for slot in self._slots]
            for slot, reference in references:
                try:
                    slot.check_update(reference, version)
                except RayError as error:
                    if not engine_died(error):
                        raise WeightSyncError(f"{slot.name}: {error}; log: {slot.log_path}") from error
                    dead.append((slot, error))
        for slot, _ in dead:
            self._restart(slot)
        for slot, _ in dead:
            self._await_start(slot)
        self._counts["sync_s"] += time.monotonic() - started

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the last call, then reset.

        group_retries, engine_restarts, generate_s, sync_s; and lost_<status>: tool calls made by attempts that were
        thrown away, which therefore appear in no trajectory.
        """
        names = ["group_retries", "engine_restarts", "generate_s", "sync_s", *(f"lost_{s}" for s in TOOL_STATUSES)]
        counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in names}

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

    # -- groups -------------------------------------------------------------------------------------------------

    def _check_prompts(self, prompts: Sequence[Prompt]) -> None:
        limit = self._config.rollout.engine.max_model_len
        for prompt in prompts:
            if not 0 < len(prompt.token_ids) < limit:
                raise ValueError(
                    f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens; it needs at least 1 and fewer than "
                    f"rollout.engine.max_model_len = {limit}"
                )

    def _dispatch(self, waiting: deque[_Job], flights: dict[Any, _Flight], samples: int) -> None:
        """Hand out jobs to the least busy live engines, each kept just busy enough to fill its batch."""
        capacity = -(-self._config.rollout.engine.max_num_seqs // samples) + 1
        load = Counter(flight.slot.index for flight in flights.values())
        now = time.monotonic()
        for _ in range(len(waiting)):
            job = waiting.popleft()
            free = [slot for slot in self._slots if slot.live and load[slot.index] < capacity]
            if not free or job.not_before > now:
                waiting.append(job)
                continue
            slot = min(free, key=lambda slot: load[slot.index])
            load[slot.index] += 1
            flights[slot.submit(job.task)] = _Flight(job, slot, now + self._config.rollout.group_timeout_s)

    def _wait(self, waiting: deque[_Job], flights: dict[Any, _Flight]) -> list[Any]:
        """References of finished groups; returns empty-handed when something else wants attention."""
        starting = [slot.ready_ref for slot in self._slots if not slot.live]
        wake = [flight.deadline for flight in flights.values()]
        wake += [job.not_before for job in waiting if job.not_before > 0]
        wake += [slot.deadline for slot in self._slots if not slot.live]
        timeout = max(0.01, min(wake) - time.monotonic()) if wake else 1.0
        watched = [*flights, *starting]
        if not watched:
            time.sleep(min(timeout, 1.0))
            return []
        ready, _ = ray.wait(watched, timeout=timeout)
        if ready:  # whatever else finished meanwhile comes along
            ready, _ = ray.wait(watched, num_returns=len(watched), timeout=0)
        return [reference for reference in ready if reference in flights]

    def _land(
        self,
        reference: Any,
        flights: dict[Any, _Flight],
        waiting: deque[_Job],
        prompts: Sequence[Prompt],
        done: dict[int, Group],
    ) -> None:
        flight = flights.pop(reference)
        try:
            outcome: GroupOutcome = ray.get(reference)
        except RayError as error:
            if not engine_died(error):
                cause = error.cause if isinstance(error, RayTaskError) else error
                raise GroupFailed(f"prompt {flight.job.task.prompt_id!r} on {flight.slot.name}: {cause!r}") from error
            if flight.slot.live:
                self._restart(flight.slot)
            self._retry(flight.job, waiting, f"{flight.slot.name} died; its log: {flight.slot.log_path}")
            return
        if outcome.trajectories is None:
            self._counts.update(f"lost_{call.status}" for call in outcome.tool_calls)
            self._retry(flight.job, waiting, outcome.failure, pause=True)
            return
        done[flight.job.index] = Group(prompts[flight.job.index], outcome.trajectories)

    def _retry(self, job: _Job, waiting: deque[_Job], cause: str, *, pause: bool = False) -> None:
        """Queue the whole group again with the same seeds, or give up."""
        job.failures += 1
        if job.failures > self._config.rollout.max_group_retries:
            raise GroupFailed(f"prompt {job.task.prompt_id!r} failed {job.failures} times; last cause: {cause}")
        self._counts["group_retries"] += 1
        if pause:
            job.not_before = time.monotonic() + min(_MAX_BACKOFF_S, 0.5 * 2 ** (job.failures - 1))
        waiting.append(job)

    def _expire(self, flights: dict[Any, _Flight], waiting: deque[_Job]) -> None:
        """Take back groups past their deadline; an engine that no longer answers is restarted."""
        now = time.monotonic()
        late = [(reference, flight) for reference, flight in flights.items() if flight.deadline <= now]
        for reference, flight in late:
            del flights[reference]
            ray.cancel(reference, force=False)
            limit = self._config.rollout.group_timeout_s
            self._retry(flight.job, waiting, f"no result from {flight.slot.name} within {limit:g} s")
        for slot in {flight.slot.index: flight.slot for _, flight in late}.values():
            if slot.live and not slot.responds():
                self._restart(slot)

    # -- engines ------------------------------------------------------------------------------------------------

    def _restart(self, slot: EngineSlot) -> None:
        self._counts["engine_restarts"] += 1
        slot.kill()
        slot.launch()

    def _revive(self) -> None:
        """Admit restarted engines that are up; raises FleetError when one failed or is late."""
        for slot in self._slots:
            if not slot.live and (ray.wait([slot.ready_ref], timeout=0)[0] or slot.deadline <= time.monotonic()):
                self._await_start(slot)

    def _await_start(self, slot: EngineSlot) -> None:
        remaining = max(0.0, slot.deadline - time.monotonic())
        ready, _ = ray.wait([slot.ready_ref], timeout=remaining)
        if not ready:
            limit = self._config.rollout.start_timeout_s
            raise FleetError(f"{slot.name} is not up after {limit:g} s (rollout.start_timeout_s); log: {slot.log_path}")
        slot.admit(self._snapshot)
