"""`logs/train.log`: the terminal output of a run and the trainer's log, each line with its time."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.text import PrintableFormatter

log = logging.getLogger(__name__)
_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


class _Handler(logging.FileHandler):
    """Says once that it cannot write, where Python's own prints a traceback for every line."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        if not self._failed:
            self._failed = True
            log.warning("warning: lines of %s are lost: %s", self.baseFilename, error)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written is tried again
            super().close()


class TrainLog:
    """Appends to `logs/train.log` of a run directory while open, and records how the run ended."""

    def __init__(self, directory: Path) -> None:
        path = RunPaths(directory).logs.train
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = _Handler(path, encoding="utf-8")
        self._handler.setFormatter(PrintableFormatter(_FORMAT, "%Y-%m-%dT%H:%M:%S%z"))
        # Not in the hierarchy of loggers: the display has already shown these lines on the terminal.
        self._shown = logging.Logger("shown", logging.INFO)
        self._shown.addHandler(self._handler)

    def __enter__(self) -> TrainLog:
        logging.captureWarnings(True)
        for logger in _loggers():
            logger.addHandler(self._handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._shown.error("the run ends with %s", type(error).__name__, exc_info=error)
        for logger in _loggers():
            logger.removeHandler(self._handler)
        logging.captureWarnings(False)
        self._handler.close()

    def shown(self, text: str) -> None:
        """Show a line of the display."""
        self._shown.info(text)


def _loggers() -> tuple[logging.Logger, ...]:
    return tuple(logging.getLogger(name) for name in ("ctpo_megatron", "ctpo_sandbox", "py.warnings"))
