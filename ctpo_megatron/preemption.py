"""SIGTERM, as schedulers send it before they kill: finish the step at hand, checkpoint, leave."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ctpo_megatron.policy import gather_objects

EXIT_STATUS = 128 + signal.SIGTERM
log = logging.getLogger(__name__)


class Preemption:
    """Ends the process at once on SIGTERM, as an exception, so that engines and sandbox are closed.

    Inside `deferred` the step at hand may end first, for at most `grace_s` seconds.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._deferring = self._asked = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_deadline)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the caller look at `requested` instead."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def requested(self) -> bool:
        """Whether any rank was asked to end; collective."""
        return any(gather_objects(self._asked))

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._deferring:
            sys.exit(EXIT_STATUS)
        if not self._asked:
            self._asked = True
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
            log.warning(
                "SIGTERM: a checkpoint follows after this step, within %g s (checkpoint.grace_s)", self._grace_s
            )

    def _on_deadline(self, _number: int, _frame: FrameType | None) -> None:
        log.error("no checkpoint within %g s of SIGTERM (checkpoint.grace_s); leaving without one", self._grace_s)
        sys.exit(EXIT_STATUS)
