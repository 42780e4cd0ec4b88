"""The phases of a step and the stages of a run: timed, and visible to the watchdog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ctpo_megatron.tracking.progress import Progress
from ctpo_megatron.tracking.timing import PhaseTimer


class Phases:
    """Times the phases of a rank and records its progress."""

    def __init__(self, timer: PhaseTimer | None = None) -> None:
        self.timer, self.progress = timer or PhaseTimer(), Progress()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the current step."""
        with self.progress.within(name), self.timer.phase(name):
            yield

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of the run."""
        with self.progress.within(name), self.timer.stage(name):
            yield

    def advance(self) -> None:
        """Record progress within a long phase."""
        self.progress.advance()
