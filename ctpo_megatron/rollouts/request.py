"""What is asked of the engines, group by group, and what comes back; the protocol of whatever answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ctpo_megatron.base.stop import Cancelled, Stop
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import Sampling
from ctpo_megatron.engines.weights import OffersWeights
from ctpo_megatron.rollouts.ledger import Quarantined
from ctpo_megatron.rollouts.timeouts import TICK_S


@dataclass(frozen=True, slots=True)
class Request:
    """How prompts are sampled.

    step: part of every sampling seed; groups of earlier steps go first. samples: trajectories of a group.
    replacements: endless, over the prompts of the data, each once an epoch; the next one is sampled instead of a
    quarantined prompt. None: its group is left out. occurrence: numbers the draws of one prompt for the step, given the
    prompt that is sampled in the end; it is part of the seeds, so that copies differ. None: every prompt is drawn once.
    early: samples are reported as they finish, and complete groups without them. done: sample indices that are not
    wanted, by prompt id.
    """

    step: int
    samples: int
    sampling: Sampling
    replacements: Iterator[Prompt] | None = None
    occurrence: Callable[[Prompt], int] | None = None
    early: bool = False
    done: Mapping[str, Collection[int]] = field(default_factory=dict)


@dataclass(slots=True)
class GroupJob:
    """A group to sample: its slot in the answer, which draw of its prompt it is, how often it failed, and when it may
    be tried again (monotonic)."""

    slot: Hashable
    prompt: Prompt
    request: Request
    occurrence: int = 0
    failures: int = 0
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class Answers:
    """What has become complete: groups with their slots, and single samples of `early` requests."""

    groups: list[tuple[Any, Group]] = field(default_factory=list)
    samples: list[tuple[Prompt, list[Trajectory]]] = field(default_factory=list)


class Generator(Protocol):
    """Samples groups: a `Scheduler` on the engines, or a `Replay` of a recording.

    lock: re-entrant; while it is held nothing is submitted, and no engine is replaced. on_hold: nothing is submitted.
    """

    lock: Any
    on_hold: bool

    @property
    def quarantined(self) -> list[Quarantined]:
        """Prompts that failed too often, oldest first; a resumed run adds the earlier ones."""

    @property
    def pending(self) -> Mapping[Any, Prompt]:
        """Prompts that are queued or sampled now, by slot."""

    @property
    def in_flight(self) -> int:
        """Groups that are being sampled."""

    def wait_ready(self) -> None:
        """Block until the engines serve. Raises EngineError, Cancelled."""

    def update(self, trainer: OffersWeights, version: int) -> None:
        """Sample what is submitted from now on with the trainer's current weights, which are `version`.

        The caller holds the lock where other threads sample. Raises as `EnginePool.send`.
        """

    def add(self, slot: Hashable, prompt: Prompt, request: Request) -> None:
        """Queue a prompt, or its replacement if it is quarantined. Raises TooManyQuarantined, and ValueError for a
        prompt that leaves no room to answer."""

    def submit(self) -> None:
        """Hand queued groups to engines. The caller holds the lock."""

    def wait(self, timeout_s: float) -> None:
        """Submit what is queued, and block until something is complete or has to be handled."""

    def collect(self) -> Answers:
        """What has become complete. The caller holds the lock. Raises EngineError, TooManyQuarantined."""

    def discard(self, slots: Collection[Hashable]) -> None:
        """Stop sampling the groups of these slots. The caller holds the lock."""

    def cancel(self) -> None:
        """Discard everything that is pending."""

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the last call, of all that share the engines."""


def ticks(generator: Generator, prompts: Collection[Prompt], request: Request, stop: Stop) -> Iterator[Answers]:
    """What becomes complete of the groups of these prompts, tick by tick, until all are complete or left out.

    The slot of a group is its prompt's position. Raises Cancelled within `TICK_S` of the stop; nothing is left running
    however the iteration ends. Also raises what `Generator.add` and `Generator.collect` raise.
    """
    generator.wait_ready()
    complete = 0
    try:
        for slot, prompt in enumerate(prompts):
            generator.add(slot, prompt, request)
        while generator.pending:
            if stop.is_set():
                raise Cancelled(f"{len(prompts) - complete} of {len(prompts)} groups were not sampled")
            answers = tick(generator, TICK_S)
            complete += len(answers.groups)
            yield answers
    finally:
        generator.cancel()


def tick(generator: Generator, timeout_s: float) -> Answers:
    """Submit, wait, collect."""
    generator.wait(timeout_s)
    lock: AbstractContextManager[Any] = generator.lock
    with lock:
        return generator.collect()
