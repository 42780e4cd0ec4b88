"""One engine of the fleet as the driver sees it: its actor, the successor of one that died, and its weights."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ctpo_megatron.rollout.engine import RolloutEngine
from ctpo_megatron.rollout.tasks import EngineLate, EngineSpec, FleetError, GroupTask, UpdateReport, WeightSyncError
from ctpo_megatron.weights import EngineFacts, EngineWeights

_PING_TIMEOUT_S = 20.0
_SHUTDOWN_TIMEOUT_S = 5.0


def engine_died(error: BaseException) -> bool:
    """True when `error`, raised by an actor call, means that the engine or its actor is gone."""
    if isinstance(error, RayActorError):
        return True
    cause = error.cause if isinstance(error, RayTaskError) else error
    return type(cause).__name__ in ("EngineDied", "EngineDeadError")


class EngineHandle:
    """Owner of engine number `index`. `launch` returns at once; `ready_ref` resolves when the engine can serve."""

    def __init__(self, index: int, spec: EngineSpec) -> None:
        self.index, self.log_path, self.name = index, spec.log_path(index), f"rollout engine {index}"
        self.live = self.parked = False
        self._spec, self._start_timeout_s = spec, spec.config.rollout.start_timeout_s
        self._update_timeout_s = spec.config.rollout.weights.timeout_s
        on_gpu, engine = spec.device == "cuda", spec.config.rollout.engine
        self._cpus, self._gpus = (1, engine.tensor_parallel_size) if on_gpu else (engine.threads, 0)
        self.needs = f"{self._cpus} CPU and {self._gpus} GPU"
        self.launch()

    def launch(self) -> None:
        """Begin a (new) engine process; it is not live until `register` succeeded, or parked until it has weights."""
        self.live = self.parked = False
        remote: Any = ray.remote(RolloutEngine)
        self._actor = remote.options(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            max_restarts=0,  # a new engine has old weights: the fleet restarts it, so that it can push first
            max_concurrency=4096,
        ).remote(self.index, self._spec)
        self.ready_ref = self._actor.start.remote()
        self.deadline = time.monotonic() + self._start_timeout_s

    def register(self, weights: EngineWeights | None, *, park: bool = False) -> None:
        """Collect the finished start, push the current weights if there are any, and go live. Raises FleetError.

        park: stay up without serving, until `admit`.
        """
        try:
            ray.get(self.ready_ref, timeout=0)
        except Exception as error:  # whatever the engine's constructor raised, Ray passes on as its own type
            raise FleetError(f"{self.name} did not start: {_last_line(error)}; log: {self.log_path}") from error
        if weights is not None:
            try:
                with weights.offered() as offer:
                    self.check_update(*self.begin_update(offer, weights), weights.version)
            except RayError as error:
                raise FleetError(f"{self.name} did not take its weights: {error}; log: {self.log_path}") from error
        self.live, self.parked = not park, park

    def admit(self) -> None:
        """Go live with the weights that came by another way than `register`."""
        self.live, self.parked = True, False

    def call(self, method: str, *arguments: Any) -> Any:
        """The reference of what a method of `RolloutEngine` returns."""
        return getattr(self._actor, method).remote(*arguments)

    def submit(self, task: GroupTask) -> Any:
        """Begin a group; returns the object reference of its GroupOutcome."""
        return self._actor.run_group.remote(task)

    def begin_sleep(self, level: int) -> Any:
        """Begin to sleep; see `RolloutEngine.sleep`."""
        return self._actor.sleep.remote(level)

    def begin_wake(self, tags: list[str]) -> Any:
        """Begin to wake; see `RolloutEngine.wake_up`."""
        return self._actor.wake_up.remote(tags)

    def facts(self) -> EngineFacts:
        """What a transport has to know of the engine."""
        facts: EngineFacts = ray.get(self._actor.facts.remote(), timeout=self._start_timeout_s)
        return facts

    def begin_update(self, offer: dict[str, Any], weights: EngineWeights) -> tuple[Any, float]:
        """Begin a weight update; returns the reference for `check_update`, and until when it has to be done."""
        reference = self._actor.update_weights.remote(offer, weights.version, weights.sums)
        return reference, time.monotonic() + self._update_timeout_s

    def check_update(self, reference: Any, deadline: float, version: int) -> UpdateReport:
        """Wait for an update and hold the engine's own answer against `version`.

        Raises EngineLate, and WeightSyncError when the engine has another version or other weights.
        """
        try:
            report: UpdateReport = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError as error:
            limit = f"{self._update_timeout_s:g} s (rollout.weights.timeout_s)"
            raise EngineLate(
                f"{self.name} has not loaded weights {version} in {limit}; log: {self.log_path}"
            ) from error
        return self.check_report(report, version)

    def check_report(self, report: UpdateReport, version: int) -> UpdateReport:
        """Raises WeightSyncError when the engine has another version or other weights."""
        if report.version != str(version):
            raise WeightSyncError(f"{self.name} reports weights {report.version!r} after being sent {version}")
        if report.wrong:
            names = f"{len(report.wrong)} tensors, e.g. {', '.join(report.wrong[:5])}"
            raise WeightSyncError(f"{self.name} keeps other values than weights {version} have in {names}")
        return report

    def responds(self) -> bool:
        """Whether the engine answers a ping in time."""
        try:
            ray.get(self._actor.ping.remote(), timeout=_PING_TIMEOUT_S)
        except (GetTimeoutError, RayError):
            return False
        return True

    def kill(self, *, gently: bool = False) -> None:
        """End the actor and its engine core; `gently` asks it to clean up first."""
        if gently:
            ray.wait([self._actor.shutdown.remote()], timeout=_SHUTDOWN_TIMEOUT_S)
        self.live = False
        ray.kill(self._actor, no_restart=True)


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
