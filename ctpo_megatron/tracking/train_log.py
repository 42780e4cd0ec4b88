"""`logs/train.log`: what the terminal shows of a run, and the log of the trainer, each line with its time."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

TRAIN_LOG = Path("logs") / "train.log"
_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


class TrainLog:
    """Appends to `logs/train.log` of a run directory while it is open, and says what ended the run."""

    def __init__(self, directory: Path) -> None:
        path = directory / TRAIN_LOG
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(path, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%dT%H:%M:%S%z"))
        # Of no hierarchy: what the display shows already must not come to the terminal once more.
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
        """A line of the display."""
        self._shown.info(text)


def _loggers() -> tuple[logging.Logger, ...]:
    return tuple(logging.getLogger(name) for name in ("ctpo_megatron", "ctpo_sandbox", "py.warnings"))
