"""One engine of the pool as rank zero sees it: its process, and the successor of one that died."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from ctpo_megatron.engines.cluster import NODE_POLL_S, EngineGroup, described, listed, living_nodes
from ctpo_megatron.engines.engine import RolloutEngine
from ctpo_megatron.engines.tasks import (
    INITIAL_VERSION,
    EngineDied,
    EngineError,
    EngineSeat,
    EngineSpec,
    GroupFailed,
    GroupOutcome,
    GroupTask,
    UpdateReport,
)
from ctpo_megatron.engines.weights import EngineFacts

_STARTS = 3
"""How often an engine is begun until it is up, within its deadline."""
_PING_S = 20.0
"""For a living engine to answer a ping."""
_CLOSE_S = 5.0
"""For an engine to clean up before its process is killed."""
_NODE_VERDICT_S = 30.0
"""Until Ray reports a node dead whose processes are gone; it takes 10 to 13 s."""

log = logging.getLogger(__name__)


class EngineHandle:
    """Engine number `index`, used on one event loop.

    live: it samples, with the weights of `version`. up: its process has loaded the model. launches: processes begun;
    answers of earlier ones do not count. facts: of the process that came up last. ready_ref: resolves when the process
    is up. group: its place on a cluster; None where Ray is private.
    """

    facts: EngineFacts
    ready_ref: Any

    def __init__(self, index: int, spec: EngineSpec, group: EngineGroup | None = None) -> None:
        self.index = index
        self.live = self.up = False
        self.version = INITIAL_VERSION
        self.launches = 0
        self._spec, self._group = spec, group

    @property
    def name(self) -> str:
        """For messages: its number and, on a cluster, the address of its node."""
        seat = None if self._group is None else self._seat()
        return f"rollout engine {self.index}" + (f" on {seat.address}" if seat else "")

    @property
    def log_path(self) -> str:
        """For messages: its log, with the address of a node that does not see the run directory."""
        here = str(self._spec.log_path(self.index))
        seat = None if self._group is None else self._seat()
        return here if seat is None or seat.log_path == here else f"{seat.address}:{seat.log_path}"

    @property
    def seated(self) -> bool:
        """Whether Ray has a process for it, which loads its model without Ray's help."""
        return self.launches > 0 and self._seat() is not None

    async def start(self) -> None:
        """Begin a process, and wait until it is up. One that dies meanwhile, or its node, is begun again.

        Raises EngineError when it does not start, or not within `rollout.start_timeout_s`.
        """
        limit_s = self._spec.config.rollout.start_timeout_s
        deadline, begun = time.monotonic() + limit_s, 0
        while True:
            begun += 1
            try:
                self._launch()
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    self.facts = await self.ready_ref
            except TimeoutError:
                limit = f"{limit_s:g} s (rollout.start_timeout_s)"
                raise EngineError(f"{self.name} is not up after {limit}; {self._waits_for()}") from None
            except Exception as error:  # whatever the engine's constructor raised, Ray passes on as its own type
                lost_node = engine_died(error) and await asyncio.to_thread(self._lost_node, error)
                if not lost_node and (not engine_died(error) or begun == _STARTS):
                    raise EngineError(f"{self.name} did not start: {reason(error)}; log: {self.log_path}") from error
                why = reason(error)
                log.warning("%s died while it started (%s); it is begun again. Log: %s", self.name, why, self.log_path)
                self.kill()
                begun = 0 if lost_node else begun
            else:
                self.up = True
                return

    def _launch(self) -> None:
        self.launches += 1
        self.version = INITIAL_VERSION
        resources = self._spec.resources
        remote: Any = ray.remote(RolloutEngine)
        self._actor = remote.options(
            num_cpus=resources["CPU"],
            num_gpus=resources["GPU"],
            max_restarts=0,  # the pool restarts it: it needs weights before it samples
            max_concurrency=4096,
            **({} if self._group is None else self._group.options(self.index)),
        ).remote(self.index, self._spec)
        self._seat_ref = self._actor.seat.remote()
        self.ready_ref = self._actor.start.remote()
        if self._group is not None:
            self._nodes = {node.id for node in living_nodes()}

    def _waits_for(self) -> str:
        """What to look at when it is late: its log, or what Ray has for it."""
        if self.seated:
            return f"log: {self.log_path}"
        there = "" if self._group is None else f"; the cluster has {listed(living_nodes())}"
        return f"Ray found no place for {described(self._spec.resources)}{there}"

    def _lost_node(self, error: BaseException) -> bool:
        """Whether its node is gone, which Ray notices late: meanwhile it begins engines there."""
        if self._group is None:
            return False
        deadline = time.monotonic() + (_NODE_VERDICT_S if isinstance(error, ActorUnavailableError) else 0.0)
        while not (lost := self._nodes - {node.id for node in living_nodes()}) and time.monotonic() < deadline:
            time.sleep(NODE_POLL_S)
        return bool(lost)

    def _seat(self) -> EngineSeat | None:
        """Where it runs; None before Ray has placed it, or when Ray never did."""
        if not ray.wait([self._seat_ref], timeout=0)[0]:
            return None
        try:
            seat: EngineSeat = ray.get(self._seat_ref)
        except RayError:
            return None
        return seat

    def call(self, method: str, *arguments: Any) -> Any:
        """The reference of what a method of `RolloutEngine` returns."""
        return getattr(self._actor, method).remote(*arguments)

    async def ask(self, what: str, limit_s: float, method: str, *arguments: Any, key: str = "") -> Any:
        """Await a method of `RolloutEngine`. what, key: for messages: what the engine is to do, the limit's name.

        Raises EngineDied when the process is gone, and EngineError when it refuses or is late.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await self.call(method, *arguments)
        except TimeoutError:
            limit = f"{limit_s:g} s" + (f" ({key})" if key else "")
            raise EngineError(f"{self.name} did not {what} within {limit}; log: {self.log_path}") from None
        except RayError as error:
            kind = EngineDied if engine_died(error) else EngineError
            raise kind(f"{self.name} did not {what}: {reason(error)}; log: {self.log_path}") from error

    async def sample(self, task: GroupTask) -> GroupOutcome:
        """Sample a group with weights as new as the engine's; cancelled, the call ends in the engine, too.

        Raises RayError.
        """
        reference = self.call("run_group", replace(task, version=self.version))
        try:
            outcome: GroupOutcome = await reference
        except asyncio.CancelledError:
            ray.cancel(reference, force=False)
            raise
        return outcome

    async def update(self, message: dict[str, Any], version: int) -> UpdateReport:
        """Take weights. Raises as `ask`."""
        limit_s = self._spec.config.rollout.weights.timeout_s
        what, key = f"take weights {version}", "rollout.weights.timeout_s"
        report: UpdateReport = await self.ask(what, limit_s, "update_weights", message, version, key=key)
        return report

    async def sleep(self, level: int, limit_s: float) -> None:
        """Release GPU memory; see `RolloutEngine.sleep`. Raises as `ask`."""
        await self.ask("fall asleep", limit_s, "sleep", level)

    async def wake(self, tags: list[str], limit_s: float) -> None:
        """Take GPU memory again; see `RolloutEngine.wake_up`. Raises as `ask`."""
        await self.ask(f"wake its {' and '.join(tags)}", limit_s, "wake_up", tags)

    async def why(self, error: RayError) -> str:
        """Why a call failed, for a message; "" when the engine has died."""
        if not engine_died(error):
            cause = error.cause if isinstance(error, RayTaskError) else error
            what = str(cause) if isinstance(cause, GroupFailed) else repr(cause)
            return f"{what} on {self.name}; its log: {self.log_path}"
        if isinstance(error, ActorUnavailableError) and await self.responds():
            return f"the connection to {self.name} broke"
        return ""

    async def responds(self) -> bool:
        """Whether the engine answers a ping in time."""
        try:
            await self.ask("answer", _PING_S, "ping")
        except (EngineDied, EngineError):
            return False
        return True

    def kill(self, *, gently: bool = False) -> None:
        """End the actor and its engine core; `gently` asks it to clean up first."""
        self.live = self.up = False
        if not self.launches:
            return
        if gently:
            ray.wait([self._actor.shutdown.remote()], timeout=_CLOSE_S)
        ray.kill(self._actor, no_restart=True)


def engine_died(error: BaseException) -> bool:
    """True when `error`, raised by an actor call, means that the engine or its actor is gone."""
    if isinstance(error, RayActorError):
        return True
    cause = error.cause if isinstance(error, RayTaskError) else error
    return type(cause).__name__ in ("EngineDied", "EngineDeadError")


def reason(error: BaseException) -> str:
    """What was raised in an engine's process, in one line; the end of what Ray says where that did not travel."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = [line.strip() for line in f"{type(cause).__name__}: {cause}".splitlines() if line.strip()]
    return lines[-1] if isinstance(cause, RayError) else " ".join(lines)
