"""One engine of the pool as rank zero sees it: its actor, the successor of one that died, and its weights."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from ctpo_megatron.engines.cluster import EngineGroup, described, listed, living_nodes
from ctpo_megatron.engines.engine import RolloutEngine
from ctpo_megatron.engines.tasks import (
    INITIAL_VERSION,
    EngineError,
    EngineSeat,
    EngineSpec,
    GroupTask,
    UpdateReport,
)
from ctpo_megatron.engines.timeouts import ENGINE_CLOSE_S, NODE_POLL_S, NODE_VERDICT_S, PING_TIMEOUT_S
from ctpo_megatron.engines.weights import EngineFacts
from ctpo_megatron.engines.weights.checksums import Part, Sums, differences

_STARTS = 3
"""How often an engine is begun until it is up, within its deadline."""

log = logging.getLogger(__name__)


def engine_died(error: BaseException) -> bool:
    """True when `error`, raised by an actor call, means that the engine or its actor is gone."""
    if isinstance(error, RayActorError):
        return True
    cause = error.cause if isinstance(error, RayTaskError) else error
    return type(cause).__name__ in ("EngineDied", "EngineDeadError")


class EngineHandle:
    """Owner of engine number `index`. `launch` returns at once; `ready_ref` resolves when the engine can serve.

    group: its place on a cluster; None where Ray is private. launches: number of processes started; results of
    earlier ones are ignored. version: of the weights that its process is to take. facts: of the process that
    registered last, which may have died since.
    """

    facts: EngineFacts

    def __init__(self, index: int, spec: EngineSpec, group: EngineGroup | None = None) -> None:
        self.index = index
        self.live = self.parked = False
        self.launches = 0
        self._spec, self._group, self._start_timeout_s = spec, group, spec.config.rollout.start_timeout_s
        self._update_timeout_s = spec.config.rollout.weights.timeout_s
        self.launch()

    @property
    def name(self) -> str:
        """For messages: its number and, on a cluster, the address of its node."""
        seat = None if self._group is None else seat_of(self._seat_ref)
        return f"rollout engine {self.index}" + (f" on {seat.address}" if seat else "")

    @property
    def log_path(self) -> str:
        """For messages: its log, with the address of a node that does not see the run directory."""
        here = str(self._spec.log_path(self.index))
        seat = None if self._group is None else seat_of(self._seat_ref)
        return here if seat is None or seat.log_path == here else f"{seat.address}:{seat.log_path}"

    @property
    def starting(self) -> bool:
        """Whether its process has not come up yet."""
        return not self.live and not self.parked

    @property
    def seated(self) -> bool:
        """Whether Ray has a process for it, which loads its model without Ray's help."""
        return seat_of(self._seat_ref) is not None

    def waits_for(self) -> str:
        """What to look at when it is late: its log, or what Ray has for it."""
        if self.seated:
            return f"log: {self.log_path}"
        there = "" if self._group is None else f"; the cluster has {listed(living_nodes())}"
        return f"Ray found no place for {described(self._spec.resources)}{there}"

    def launch(self) -> None:
        """Begin a (new) engine process; it is not live until `register` succeeded, or parked until it has weights."""
        self.deadline = time.monotonic() + self._start_timeout_s
        self._begun = 0
        self._launch()

    def _launch(self) -> None:
        self.live = self.parked = False
        self.launches += 1
        self._begun += 1
        self.version = INITIAL_VERSION
        resources = self._spec.resources
        remote: Any = ray.remote(RolloutEngine)
        self._actor = remote.options(
            num_cpus=resources["CPU"],
            num_gpus=resources["GPU"],
            max_restarts=0,  # a new engine has old weights: the pool restarts it, and sends the current ones first
            max_concurrency=4096,
            **({} if self._group is None else self._group.options(self.index)),
        ).remote(self.index, self._spec)
        self._seat_ref = self._actor.seat.remote()
        self.ready_ref = self._actor.start.remote()
        if self._group is not None:
            self._nodes = {node.id for node in living_nodes()}

    def take_start(self) -> bool:
        """Collect the finished start: whether the process is up. Raises EngineError when it did not start.

        An engine whose process or node died meanwhile is begun again, with the deadline that it had.
        """
        try:
            _, self.facts = ray.get(self.ready_ref, timeout=0)
        except Exception as error:  # whatever the engine's constructor raised, Ray passes on as its own type
            if self._begun_again(error):
                return False
            raise EngineError(f"{self.name} did not start: {reason(error)}; log: {self.log_path}") from error
        return True

    def retry_start(self, error: BaseException | str) -> None:
        """Begin again a process that has started, but died of its weights. Raises EngineError for another `error`."""
        cause = error if isinstance(error, BaseException) else None
        if cause is None or not self._begun_again(cause):
            raise EngineError(f"{self.name} did not take its weights: {error}; log: {self.log_path}") from cause

    def park(self) -> None:
        """Stay up without serving, until `admit`."""
        self.live, self.parked = False, True

    def admit(self) -> None:
        """Serve from now on."""
        self.live, self.parked = True, False

    def call(self, method: str, *arguments: Any) -> Any:
        """The reference of what a method of `RolloutEngine` returns."""
        return getattr(self._actor, method).remote(*arguments)

    def _begun_again(self, error: BaseException) -> bool:
        """Launch it once more if its process died, or its node: Ray notices that late, and begins engines there."""
        if not engine_died(error) or (not self._lost_node(error) and self._begun == _STARTS):
            return False
        log.warning(
            "%s died while it started (%s); it is begun again. Log: %s", self.name, reason(error), self.log_path
        )
        self.kill()
        self._launch()
        return True

    def _lost_node(self, error: BaseException) -> bool:
        if self._group is None:
            return False
        deadline = time.monotonic() + (NODE_VERDICT_S if isinstance(error, ActorUnavailableError) else 0.0)
        while not (lost := self._nodes - {node.id for node in living_nodes()}) and time.monotonic() < deadline:
            time.sleep(NODE_POLL_S)
        if lost:
            self._begun = 0
        return bool(lost)

    def submit(self, task: GroupTask) -> Any:
        """Begin a group, with weights as new as it is to take; the object reference of its GroupOutcome."""
        return self._actor.run_group.remote(replace(task, version=self.version))

    def begin_sleep(self, level: int) -> Any:
        """Begin to sleep; see `RolloutEngine.sleep`."""
        return self._actor.sleep.remote(level)

    def begin_wake(self, tags: list[str]) -> Any:
        """Begin to wake; see `RolloutEngine.wake_up`."""
        return self._actor.wake_up.remote(tags)

    def begin_update(self, message: dict[str, Any], version: int) -> tuple[Any, float]:
        """Begin to take weights; returns the reference for `update_report`, and until when it has to be done."""
        reference = self._actor.update_weights.remote(message, version)
        self.version = version
        return reference, time.monotonic() + self._update_timeout_s

    def update_report(self, reference: Any, version: int) -> UpdateReport:
        """The report of an update that has ended. Raises EngineError when it is late, and what the engine raised."""
        try:
            report: UpdateReport = ray.get(reference, timeout=0)
        except GetTimeoutError as error:
            limit = f"{self._update_timeout_s:g} s (rollout.weights.timeout_s)"
            raise EngineError(
                f"{self.name} has not loaded weights {version} in {limit}; log: {self.log_path}"
            ) from error
        return report

    def check_report(self, report: UpdateReport, version: int, sums: Sums) -> list[str]:
        """Compare what an engine reports with the weights that it was offered; tensors that cannot be read back.

        Raises EngineError when the engine has another version or other weights.
        """
        if report.version != str(version):
            raise EngineError(f"{self.name} reports weights {report.version!r} after being sent {version}")
        wrong, unchecked = differences((Part(*part) for part in report.parts), sums)
        if wrong:
            names = f"{len(wrong)} tensors, e.g. {', '.join(wrong[:5])}"
            raise EngineError(
                f"{self.name} keeps other values than weights {version} have in {names}; so it looks, too, where they "
                "have become NaN or infinite (see actor/grad_norm of the last steps)"
            )
        return unchecked

    def responds(self) -> bool:
        """Whether the engine answers a ping in time."""
        try:
            ray.get(self._actor.ping.remote(), timeout=PING_TIMEOUT_S)
        except (GetTimeoutError, RayError):
            return False
        return True

    def kill(self, *, gently: bool = False) -> None:
        """End the actor and its engine core; `gently` asks it to clean up first."""
        if gently:
            ray.wait([self._actor.shutdown.remote()], timeout=ENGINE_CLOSE_S)
        self.live = False
        ray.kill(self._actor, no_restart=True)


def seat_of(reference: Any) -> EngineSeat | None:
    """The result of a call of `RolloutEngine.seat`; None before Ray has placed the engine, or when it never did."""
    if not ray.wait([reference], timeout=0)[0]:
        return None
    try:
        seat: EngineSeat = ray.get(reference)
    except RayError:
        return None
    return seat


def reason(error: BaseException) -> str:
    """What was raised in an engine's process, in one line; the end of what Ray says where that did not travel."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = [line.strip() for line in f"{type(cause).__name__}: {cause}".splitlines() if line.strip()]
    return lines[-1] if isinstance(cause, RayError) else " ".join(lines)
