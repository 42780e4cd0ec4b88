"""Groups on engines: which one begins first and where, what is tried again, and which prompts are abandoned."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.text import hidden, printable
from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import GroupFailed, GroupLost, GroupTask

if TYPE_CHECKING:
    from ctpo_megatron.engines import EnginePool
    from ctpo_megatron.rollouts.replay import Replay

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Before a group is tried again; it doubles with each failure."""
_SHOWN, _DRAWS = 5, 1000

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


class Quarantine:
    """The quarantined prompts of one run. limit: `rollout.max_quarantined`. records: oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records: list[Quarantined] = []

    def __contains__(self, prompt: Prompt) -> bool:
        return any(record.prompt_id == prompt.id for record in self.records)

    def __str__(self) -> str:
        return "; ".join(map(str, self.records[-_SHOWN:]))

    def add(self, record: Quarantined) -> None:
        """Add a prompt and log it. Raises TooManyQuarantined beyond the limit."""
        self.records.append(record)
        log.warning("quarantined, will not be sampled again: %s", record)
        if len(self.records) > self.limit:
            raise TooManyQuarantined(
                f"{len(self.records)} prompts were quarantined, more than rollout.max_quarantined = {self.limit}; "
                f"the last: {self}. Remove the cause, or take these prompts out of the data; if single failures "
                "are expected, raise rollout.max_group_retries, rollout.group_timeout_s or rollout.max_quarantined. "
                "Engine logs are in <run>/logs"
            )

    def replace(self, prompt: Prompt, draw: Callable[[], Prompt]) -> tuple[Prompt, int]:
        """Return the prompt, or the next one that is not quarantined, and how many were drawn for it.

        Raises TooManyQuarantined after more draws than any but a mix, of a file that has no others, can need.
        """
        limit = _DRAWS * (len(self.records) + 1)
        for drawn in range(limit):
            if prompt not in self:
                return prompt, drawn
            prompt = draw()
        raise TooManyQuarantined(
            f"{limit} prompts drawn in a row are all quarantined: remove the cause, or have data.sampler or the "
            f"weights of data.train choose others; the last: {self}"
        )


class GroupSampler:
    """Samples the groups of training and evaluation on the same engines. Used on one event loop.

    engines: an `EnginePool`, or a `Replay`. on_hold: no further group begins. in_flight: groups that are sampled now.
    quarantine: prompts that failed too often.
    """

    def __init__(self, engines: EnginePool | Replay, config: RolloutConfig) -> None:
        self.engines, self._config = engines, config
        self.quarantine = Quarantine(config.max_quarantined)
        self.on_hold = False
        self.in_flight = 0
        self._load, self._urgent = Counter[int](), Counter[int]()  # samples on each engine
        self._waiting: list[tuple[tuple[Any, ...], int, bool, asyncio.Future[Any]]] = []
        self._number = itertools.count()
        self._lengths: dict[str, float] = {}
        self._sum = 0.0
        self._under_way: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        engines.observers.append(self._changed)

    async def sample(self, task: GroupTask, *, urgent: bool = False) -> list[Trajectory]:
        """Return the trajectories of a group; of a failed attempt with the same seeds from another one.

        urgent: groups that are not yield to it, whatever their step. Raises GroupFailed after `max_group_retries`, and
        EngineError when the engines cannot continue.
        """
        if self.engines.failure is not None:
            raise self.engines.failure
        work = asyncio.current_task()
        assert work is not None
        self._under_way.add(work)
        try:
            return await self._sampled(task, urgent)
        except asyncio.CancelledError:
            if self.engines.failure is None:
                raise
            work.uncancel()
            raise self.engines.failure from None
        finally:
            self._under_way.discard(work)

    async def _sampled(self, task: GroupTask, urgent: bool) -> list[Trajectory]:
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

    def _changed(self) -> None:
        """An engine serves that did not, or the engines cannot continue, which ends every group."""
        self._assign()
        if self.engines.failure is not None:
            for work in self._under_way:
                work.cancel()

    def lose(self, prompt: Prompt, step: int, error: GroupFailed) -> None:
        """Put a prompt into quarantine, once. Raises TooManyQuarantined."""
        if prompt not in self.quarantine:  # small data may hold a prompt twice in a batch
            self.engines.counts["quarantined"] += 1
            self.quarantine.add(Quarantined(prompt.id, step, str(error)))

    async def drain(self) -> None:
        """Return when no group is in flight; `on_hold` is set."""
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    def resume(self) -> None:
        """Let groups begin again."""
        self.on_hold = False
        self._assign()

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
        self._note(task.prompt, trajectories)
        return trajectories

    # Places on engines.

    async def _place(self, task: GroupTask, size: int, urgent: bool) -> Any:
        """Wait for an engine with room. Early steps come first, then the longest groups, so that none ends alone."""
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

    def _note(self, prompt: Prompt, trajectories: list[Trajectory]) -> None:
        mean = statistics.fmean(trajectory.response_tokens for trajectory in trajectories)
        self._sum += mean - self._lengths.get(prompt.id, 0.0)
        self._lengths[prompt.id] = mean
