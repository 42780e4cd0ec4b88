"""Groups on engines: which one begins first and where, what is tried again, and which prompts are abandoned."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.text import hidden, printable
from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import GroupFailed, GroupLost, GroupTask

if TYPE_CHECKING:
    from ctpo_megatron.engines import EnginePool
    from ctpo_megatron.rollouts.replay import Replay

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Before a group is tried again; it doubles with each failure."""
_SHOWN = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A prompt that will not be sampled again. step: when its group was discarded; cause: its last failure."""

    prompt_id: str
    step: int
    cause: str

    def __str__(self) -> str:
        return f"prompt {self.prompt_id!r} (step {self.step}): {self.cause}"


class TooManyQuarantined(RuntimeError):
    """More prompts failed than the run may lose; the message names them, the causes, and what to do."""


class GroupSampler:
    """Samples the groups of training and evaluation on the same engines. Used on one event loop.

    engines: an `EnginePool`, or a `Replay`. quarantined: prompts that failed too often, oldest first. on_hold: no
    further group begins. in_flight: groups that are sampled now.
    """

    def __init__(self, engines: EnginePool | Replay, config: RolloutConfig) -> None:
        self.engines, self._config = engines, config
        self.quarantined: list[Quarantined] = []
        self.on_hold = False
        self.in_flight = 0
        self._load, self._urgent = Counter[int](), Counter[int]()  # samples on each engine
        self._waiting: list[tuple[tuple[Any, ...], int, bool, asyncio.Future[Any]]] = []
        self._number = itertools.count()
        self._lengths: dict[str, float] = {}
        self._sum = 0.0
        self._idle = asyncio.Event()
        engines.observers.append(self._changed)

    async def sample(self, task: GroupTask, *, urgent: bool = False) -> list[Trajectory]:
        """Return the trajectories of a group; of a failed attempt with the same seeds from another one.

        urgent: groups that are not yield to it, whatever their step. Raises GroupFailed after `max_group_retries`, and
        EngineError when the engines cannot continue.
        """
        for failures in itertools.count(1):
            try:
                return await self._attempt(task, urgent)
            except GroupFailed as error:
                if isinstance(error, GroupLost) or failures > self._config.max_group_retries:
                    cause = printable(hidden(str(error)))
                    raise GroupFailed(f"failed {failures} times, the last: {cause}") from error
            self.engines.counts["group_retries"] += 1
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1)))
        raise AssertionError  # it counts for ever

    async def _attempt(self, task: GroupTask, urgent: bool) -> list[Trajectory]:
        size = len(task.samples)
        engine = await self._place(task, size, urgent)
        self.in_flight += 1
        try:
            async with asyncio.timeout(self._config.group_timeout_s):
                trajectories = await self.engines.sample(engine, task)
        except TimeoutError:
            await self.engines.check(engine)
            limit = f"{self._config.group_timeout_s:g} s"
            raise GroupFailed(f"no result from {engine.name} within {limit}") from None
        finally:
            self.in_flight -= 1
            self._leave(engine.index, size, urgent)
        self._check_engines()
        self._note(task.prompt, trajectories)
        return trajectories

    def _note(self, prompt: Prompt, trajectories: list[Trajectory]) -> None:
        mean = statistics.fmean(trajectory.response_tokens for trajectory in trajectories)
        self._sum += mean - self._lengths.get(prompt.id, 0.0)
        self._lengths[prompt.id] = mean

    def _check_engines(self) -> None:
        """Raise why the engines cannot continue, if they cannot: they may have had other weights than were sent."""
        if self.engines.failure is not None:
            raise self.engines.failure

    # Prompts that fail too often.

    def is_quarantined(self, prompt: Prompt) -> bool:
        """Return whether a prompt is not to be sampled."""
        return any(record.prompt_id == prompt.id for record in self.quarantined)

    def lose(self, prompt: Prompt, step: int, error: GroupFailed) -> None:
        """Put a prompt into quarantine, once. Raises TooManyQuarantined beyond `rollout.max_quarantined`."""
        if self.is_quarantined(prompt):  # small data may hold a prompt twice in a batch
            return
        self.engines.counts["quarantined"] += 1
        self.quarantined.append(Quarantined(prompt.id, step, str(error)))
        log.warning("quarantined, will not be sampled again: %s", self.quarantined[-1])
        if len(self.quarantined) > self._config.max_quarantined:
            raise TooManyQuarantined(
                f"{len(self.quarantined)} prompts were quarantined, more than rollout.max_quarantined = "
                f"{self._config.max_quarantined}; the last: {self.last_quarantined}. Remove the cause, or take these "
                "prompts out of the data; if single failures are expected, raise rollout.max_group_retries, "
                "rollout.group_timeout_s or rollout.max_quarantined. Engine logs are in <run>/logs"
            )

    @property
    def last_quarantined(self) -> str:
        """The last few, for messages."""
        return "; ".join(map(str, self.quarantined[-_SHOWN:]))

    # Places on engines.

    async def drain(self) -> None:
        """Return when no group is in flight; `on_hold` is set."""
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    def resume(self) -> None:
        """Let groups begin again."""
        self.on_hold = False
        self._assign()

    async def _place(self, task: GroupTask, size: int, urgent: bool) -> Any:
        """Wait for an engine with room. Early steps come first, then the longest groups, so that none ends alone."""
        self._check_engines()
        turn: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        usual = self._sum / len(self._lengths) if self._lengths else 0.0
        expected = self._lengths.get(task.prompt.id, usual)
        order = (not urgent, task.step, -expected, -len(task.prompt.token_ids), next(self._number))
        heapq.heappush(self._waiting, (order, size, urgent, turn))
        asyncio.get_running_loop().call_soon(self._assign)  # once all groups of a draw wait
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(turn.result().index, size, urgent)
            raise

    def _changed(self) -> None:
        """An engine samples that did not, or the engines cannot continue."""
        if self.engines.failure is not None:
            for *_, turn in self._waiting:
                if not turn.done():
                    turn.set_exception(self.engines.failure)
        self._assign()

    def _assign(self) -> None:
        """Give free places to groups that wait."""
        while self._waiting and not self.on_hold:
            _, size, urgent, turn = self._waiting[0]
            if not turn.done():
                # One group more than fills its batch: an engine does not idle when a group ends.
                room = (-(-self._config.engine.max_num_seqs // size) + 1) * size
                taken = self._urgent if urgent else self._load
                free = [each for each in self.engines.engines if each.live and taken[each.index] + size <= room]
                if not free:
                    return
                engine = min(free, key=lambda each: self._load[each.index])
                self._take(engine.index, size, urgent)
                turn.set_result(engine)
            heapq.heappop(self._waiting)

    def _take(self, index: int, size: int, urgent: bool) -> None:
        self._load[index] += size
        self._urgent[index] += size * urgent

    def _leave(self, index: int, size: int, urgent: bool) -> None:
        self._take(index, -size, urgent)
        self._idle.set()
        self._assign()
