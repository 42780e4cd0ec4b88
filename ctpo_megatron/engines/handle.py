"""One engine of the pool as rank zero sees it: its process, the successor of one that died, and its weight updates."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from ctpo_megatron.base.event_loop import end
from ctpo_megatron.engines.engine import RolloutEngine
from ctpo_megatron.engines.ray_runtime import EnginePlaces
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
from ctpo_megatron.engines.weights.checksums import Sums, different

_STARTS = 3
"""How often an engine is begun until it is up, within its deadline."""
_DEAD_NODE_S = 15.0
"""For Ray to notice that a node of a cluster is gone; until then it would begin engines there."""
_PING_S = 20.0
"""For a living engine to answer a ping."""
_CLOSE_S = 5.0
"""For an engine to clean up before its process is killed."""

log = logging.getLogger(__name__)


class EngineHandle:
    """Engine number `index`, used on one event loop.

    live: it samples, with the weights of `version`. up: its process has loaded the model. launches: processes begun;
    answers of earlier ones do not count. facts: of the process that came up last. places: of the engines on a cluster;
    None where Ray is private.
    """

    facts: EngineFacts

    def __init__(self, index: int, spec: EngineSpec, places: EnginePlaces | None = None) -> None:
        self.index = index
        self.live = self.up = False
        self.version = INITIAL_VERSION
        self.launches = 0
        self._spec, self._places = spec, places
        self._groups, self._idle_s, self._idle_from = 0, 0.0, time.monotonic()

    @property
    def name(self) -> str:
        """For messages: its number and, on a cluster, the address of its node."""
        seat = None if self._places is None else self._seat()
        return f"rollout engine {self.index}" + (f" on {seat.address}" if seat else "")

    @property
    def log_path(self) -> str:
        """For messages: its log, with the address of a node that does not see the run directory."""
        here = str(self._spec.log_path(self.index))
        seat = None if self._places is None else self._seat()
        return here if seat is None or seat.log_path == here else f"{seat.address}:{seat.log_path}"

    async def start(self) -> None:
        """Begin a process, and wait until it is up. One that dies meanwhile is begun again.

        Raises EngineError when it does not start, or not within `rollout.start_timeout_s`.
        """
        limit_s = self._spec.config.rollout.start_timeout_s
        deadline = asyncio.get_running_loop().time() + limit_s
        for left in reversed(range(_STARTS)):
            try:
                self._launch()
                async with asyncio.timeout_at(deadline):
                    self.facts = await self._ready
            except TimeoutError:
                limit = f"{limit_s:g} s (rollout.start_timeout_s)"
                raise EngineError(f"{self.name} is not up after {limit}; {self._waits_for()}") from None
            except Exception as error:  # whatever the engine's constructor raised, Ray passes on as its own type
                why = reason(error)
                if not (left and engine_died(error)):
                    raise EngineError(f"{self.name} did not start: {why}; log: {self.log_path}") from error
                log.warning("%s died while it started (%s); it is begun again. Log: %s", self.name, why, self.log_path)
                self.kill()
                await asyncio.sleep(0 if self._places is None else _DEAD_NODE_S)
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
            **({} if self._places is None else self._places.options(self.index)),
        ).remote(self.index, self._spec)
        self._seat_ref = self._actor.seat.remote()
        self._ready = self._actor.start.remote()

    def _waits_for(self) -> str:
        """What to look at when it is late: its log, or what Ray has for it."""
        if self._seat() is not None:
            return f"log: {self.log_path}"
        needs = " and ".join(f"{amount} {name}" for name, amount in self._spec.resources.items())
        return f"Ray found no place for {needs}" + ("" if self._places is None else f"; {self._places}")

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
            limit = f"{limit_s:g} s" + (f" ({key})" if key else "")
            raise EngineError(f"{self.name} did not {what} within {limit}; log: {self.log_path}") from None
        except RayError as error:
            kind = EngineDied if engine_died(error) else EngineError
            raise kind(f"{self.name} did not {what}: {reason(error)}; log: {self.log_path}") from error

    async def sample(self, task: GroupTask) -> GroupOutcome:
        """Sample a group with weights as new as the engine's; cancelled, the call ends in the engine, too.

        Raises RayError.
        """
        self._count(1)
        reference = self.call("run_group", replace(task, version=self.version))
        try:
            outcome: GroupOutcome = await reference
        except asyncio.CancelledError:
            ray.cancel(reference, force=False)
            raise
        finally:
            self._count(-1)
        return outcome

    def _count(self, groups: int) -> None:
        """It samples more groups, or fewer."""
        now = time.monotonic()
        if not self._groups:
            self._idle_s += now - self._idle_from
        self._groups += groups
        self._idle_from = now

    def take_idle(self) -> float:
        """Return the seconds since the last call in which it had nothing to sample."""
        self._count(0)
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

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


class EngineUpdate:
    """A version that engines take at once, made on their event loop.

    They take it by themselves, as `message` describes. Where there is none the transport leads them, call by call.

    task: ends when the update is over; the pool sets it. led: whether there is no message. failed: engines that have
    not taken it, with the number of their process and the cause. sums: of what was sent, once that is known.
    """

    task: asyncio.Task[None]

    def __init__(
        self, version: int, engines: Sequence[EngineHandle], message: dict[str, Any] | None, timeout_s: float
    ) -> None:
        self.version, self.engines = version, engines
        self.failed: dict[EngineHandle, tuple[int, object]] = {}
        self.sums: asyncio.Future[Sums] = asyncio.get_running_loop().create_future()
        self._launches = {engine: engine.launches for engine in engines}
        self._reports: list[tuple[EngineHandle, UpdateReport]] = []
        self._began, self._timeout_s, self.led = time.monotonic(), timeout_s, message is None
        self._calls = {} if message is None else self._call("update_weights", lambda _: (message, version))

    def _call(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> dict[EngineHandle, asyncio.Task[Any]]:
        """Begin to call all engines that have not failed. arguments: of engine number n."""
        what, key = f"take weights {self.version}", "rollout.weights.timeout_s"
        return {
            engine: asyncio.create_task(engine.ask(what, self._timeout_s, method, *arguments(number), key=key))
            for number, engine in enumerate(self.engines)
            if engine not in self.failed
        }

    async def _wait(self, calls: dict[EngineHandle, asyncio.Task[Any]], when: str) -> None:
        """Wait for calls, and note what has become of them; those that are not waited for are ended."""
        try:
            if calls:
                await asyncio.wait(calls.values(), return_when=when)
        finally:
            await end([call for call in calls.values() if not call.done()])
            for engine, call in calls.items():
                if call.cancelled() or (error := call.exception()) is not None:
                    self._fail(engine, "its call was broken off" if call.cancelled() else error)
                elif isinstance(report := call.result(), UpdateReport):
                    self._reports.append((engine, report))

    def _fail(self, engine: EngineHandle, why: object) -> None:
        what = reason(why) if isinstance(why, BaseException) else why  # Ray's errors are pages of traceback
        log.warning("%s did not take weights %d: %s", engine.name, self.version, what)
        self.failed[engine] = self._launches[engine], why

    async def lead(self, method: str, arguments: Callable[[int], Any] | None, *, joined: bool) -> None:
        """Call a method of all engines that have not failed. arguments: the one of engine number n; None: none.

        joined: an engine that fails leaves the others waiting: all of them fail then, at once.
        """
        calls = self._call(method, lambda number: () if arguments is None else (arguments(number),))
        try:
            await self._wait(calls, asyncio.FIRST_EXCEPTION if joined else asyncio.ALL_COMPLETED)
        finally:
            for engine in calls.keys() - self.failed.keys() if joined and self.failed else ():
                self._fail(engine, f"the transfer was aborted, as {next(iter(self.failed)).name} failed")

    async def settled(self) -> Sums:
        """Wait until each engine has taken the version or failed, and all of it was sent; returns the sums."""
        await self._wait(self._calls, asyncio.ALL_COMPLETED)
        return await self.sums

    @property
    def seconds(self) -> float:
        """Until the last engine had the weights, when it is over; without what the trainer did meanwhile."""
        if self.led:
            return time.monotonic() - self._began
        return max((report.seconds for _, report in self._reports), default=0.0)

    def compare(self, sent: Sums) -> None:
        """Raises EngineError when an engine reports another version, or has received other tensors than were sent."""
        for engine, report in self._reports:
            if report.version != str(self.version):
                raise EngineError(f"{engine.name} reports weights {report.version!r} after being sent {self.version}")
            for received in report.sums:
                if wrong := different(sent, received):
                    names = f"{len(wrong)} tensors, e.g. {', '.join(wrong[:5])}"
                    raise EngineError(
                        f"{engine.name} received other values than weights {self.version} have in {names}"
                    )


async def ask_all(
    engines: Sequence[EngineHandle], what: str, limit_s: float, method: str, *arguments: Any
) -> dict[EngineHandle, Any]:
    """Await a method of engines, as `EngineHandle.ask`; returns the answer of each, or what it raised."""
    calls = [engine.ask(what, limit_s, method, *arguments) for engine in engines]
    return dict(zip(engines, await asyncio.gather(*calls, return_exceptions=True), strict=True))


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
