"""SIGTERM, as schedulers send it before they kill: checkpoint what is done, leave."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ctpo_megatron.policy import gather_objects

EXIT_STATUS = 128 + signal.SIGTERM
_STDERR = 2
log = logging.getLogger(__name__)


class Preemption:
    """Ends the process at once on SIGTERM, as an exception, so that engines and sandbox are closed.

    Inside `deferred` the state may be saved first, for at most `grace_s` seconds.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._deferring = self._asked = False
        self._process = os.getpid()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_deadline)
        _warn_of_launcher(grace_s)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the caller look at `asked` and `requested` instead."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def asked(self) -> bool:
        """Whether this process was asked to end."""
        return self._asked

    def requested(self) -> bool:
        """Whether any rank was asked to end; collective."""
        return any(gather_objects(self._asked))

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._deferring:
            sys.exit(EXIT_STATUS)
        # Processes forked to write a checkpoint have this handler too, and their work is wanted.
        if not self._asked and os.getpid() == self._process:
            self._asked = True
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
            _say(f"SIGTERM: a checkpoint follows, within {self._grace_s:g} s (checkpoint.grace_s)")

    def _on_deadline(self, _number: int, _frame: FrameType | None) -> None:
        _say(f"no checkpoint within {self._grace_s:g} s of SIGTERM (checkpoint.grace_s); leaving without one")
        sys.exit(EXIT_STATUS)


def _say(line: str) -> None:
    # Within a signal handler: a logger's stream may be in the middle of a write.
    os.write(_STDERR, f"{line}\n".encode())


def _warn_of_launcher(grace_s: float) -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK") != "0":
        return
    limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
    if grace_s >= limit:
        log.warning(
            "checkpoint.grace_s is %g s, but torchrun kills its ranks %g s after SIGTERM: export "
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT (or give --shutdown-timeout) with more, unless you did the latter",
            grace_s,
            limit,
        )
