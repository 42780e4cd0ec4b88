"""One process of an engine as rank zero sees it, and what becomes of a weight update."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines.engine import EngineDied, EngineError, EngineSpec, GroupFailed, GroupTask, RolloutEngine
from ctpo_megatron.engines.weights import EngineFacts
from ctpo_megatron.engines.weights.checksums import Sums, different

_PING_S = 20.0
"""For a living engine to answer a ping."""
_CLOSE_S = 5.0
"""For an engine to clean up before its process is killed."""

log = logging.getLogger(__name__)


class EngineHandle:
    """One process of engine number `index`, used on one event loop; another handle takes its place when it dies.

    facts: what the process tells once it has loaded the model. version: of the weights that it samples with; None while
    it does not. node: on which to start it, if there is room, by Ray's id; None where Ray is private.
    """

    def __init__(self, index: int, spec: EngineSpec, node: str | None = None) -> None:
        self.index = index
        self.facts: EngineFacts | None = None
        self.version: int | None = None
        self._spec, self._node = spec, node
        self._actor: Any = None

    @property
    def up(self) -> bool:
        """Whether it can be called."""
        return self.facts is not None

    @property
    def live(self) -> bool:
        """Whether it samples."""
        return self.version is not None

    @property
    def name(self) -> str:
        """For messages: its number and, on a cluster, the address of its node."""
        there = "" if self._node is None or self.facts is None else f" on {self.facts.address}"
        return f"rollout engine {self.index}{there}"

    @property
    def log_path(self) -> str:
        """For messages: its log, with the address of a node that does not see the run directory."""
        here = str(self._spec.log_path(self.index))
        if self._node is None or self.facts is None or self.facts.log == here:
            return here
        return f"{self.facts.address}:{self.facts.log}"

    async def start(self) -> None:
        """Begin the process, and wait until it has loaded the model. Raises as `ask`; nothing is left then."""
        limit_s, resources = self._spec.config.rollout.start_timeout_s, self._spec.resources
        where: Any = "DEFAULT" if self._node is None else NodeAffinitySchedulingStrategy(self._node, soft=True)
        remote: Any = ray.remote(RolloutEngine)
        self._actor = remote.options(
            num_cpus=resources["CPU"],
            num_gpus=resources["GPU"],
            max_restarts=0,  # the pool restarts it: it needs weights before it samples
            max_concurrency=4096,
            scheduling_strategy=where,
        ).remote(self.index, self._spec)
        try:
            self.facts = await self.ask("start", limit_s, "start", key="rollout.start_timeout_s")
        except BaseException:
            self.end()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor; the answer is awaited."""
        return getattr(self._actor, method).remote(*arguments)

    async def ask(self, what: str, limit_s: float, method: str, *arguments: Any, key: str = "") -> Any:
        """Await a method of `RolloutEngine`. what, key: for messages: what the engine is to do, the limit's name.

        Raises EngineDied when the process is gone, and EngineError when it refuses or is late.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await self.call(method, *arguments)
        except TimeoutError:
            why = f"within {limit_s:g} s" + (f" ({key})" if key else "")
            raise EngineError(f"{self.name} did not {what} {why}; log: {self.log_path}") from None
        except RayError as error:
            kind = EngineDied if engine_died(error) else EngineError
            raise kind(f"{self.name} did not {what}: {reason(error)}; log: {self.log_path}") from error

    async def sample(self, task: GroupTask) -> list[Trajectory]:
        """Sample a group with weights as new as the engine's; cancelled, the call ends in the engine, too.

        Raises EngineDied when the process is gone, and GroupFailed.
        """
        reference = self.call("run_group", task, self.version)
        try:
            trajectories: list[Trajectory] = await reference
        except asyncio.CancelledError:
            ray.cancel(reference, force=False)
            raise
        except RayError as error:
            if not engine_died(error):
                cause = error.cause if isinstance(error, RayTaskError) else error
                what = str(cause) if isinstance(cause, GroupFailed) else repr(cause)
                failed = GroupFailed(f"{what} on {self.name}; its log: {self.log_path}")
                failed.lost_calls = getattr(cause, "lost_calls", ())
                raise failed from error
            if isinstance(error, ActorUnavailableError) and await self.responds():
                raise GroupFailed(f"the connection to {self.name} broke") from error
            raise EngineDied(f"{self.name} died; its log: {self.log_path}") from error
        return trajectories

    async def responds(self) -> bool:
        """Return whether the engine answers a ping in time."""
        try:
            await self.ask("answer", _PING_S, "ping")
        except (EngineDied, EngineError):
            return False
        return True

    def end(self) -> None:
        """Kill the process, if it was begun."""
        self.facts = self.version = None
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)


def shut_down(engines: Iterable[EngineHandle]) -> None:
    """Let engines that are up clean up, for a few seconds, and kill all of them."""
    ends = [engine.call("shutdown") for engine in engines if engine.up]
    if ends:
        ray.wait(ends, num_returns=len(ends), timeout=_CLOSE_S)
    for engine in engines:
        engine.end()


@dataclass(eq=False)
class EngineUpdate:
    """A version that engines take at once: those that are up. led: by a transport, call by call.

    sums: of what was sent, once that is known. received: the sums of each engine's workers. seconds: until the last
    engine had answered. task: ends when the update is over; the pool sets it.
    """

    version: int
    engines: Sequence[EngineHandle]
    led: bool
    sums: asyncio.Future[Sums] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    received: dict[EngineHandle, list[Sums]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    task: asyncio.Task[None] = field(init=False)

    def compare(self, sent: Sums) -> None:
        """Raises EngineError when an engine has received other tensors than were sent."""
        for engine in self.engines:
            for received in self.received[engine] if engine.up else ():
                if wrong := different(sent, received):
                    names = f"{len(wrong)} tensors, e.g. {', '.join(wrong[:5])}"
                    raise EngineError(
                        f"{engine.name} received other values than weights {self.version} have in {names}"
                    )


def engine_died(error: BaseException) -> bool:
    """True when `error`, raised by an actor call, means that the engine or its actor is gone."""
    if isinstance(error, RayActorError):
        return True
    cause = error.cause if isinstance(error, RayTaskError) else error
    return type(cause).__name__ in ("EngineDied", "EngineDeadError")


def reason(error: BaseException) -> str:
    """Return what was raised in an engine's process, in one line; the end of what Ray says where that did not
    travel.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = [line.strip() for line in f"{type(cause).__name__}: {cause}".splitlines() if line.strip()]
    return lines[-1] if isinstance(cause, RayError) else " ".join(lines)
