"""Reads a run directory, for the terminal summary and the report."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.files import read_mapping, read_note
from ctpo_megatron.base.printable import printable
from ctpo_megatron.base.run_paths import SFT_METRICS, RunPaths
from ctpo_megatron.config import without_removed
from ctpo_megatron.tracking import TimeSpent, read_metrics, read_stages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

ENGINE = "engine/"
ACCURACY = re.compile(r"val/(?P<source>.+)/acc/mean@\d+")
_POINTS = 300
_SILENT_S = 30.0
"""A gap between rows of at least this many seconds means that the run was not running."""


@dataclass(frozen=True)
class Series:
    """One metric over the steps with a finite value (of engines: over minutes); never empty."""

    steps: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class RunData:
    """The files of a finished, running or interrupted run, except trajectories."""

    directory: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    sft: list[dict[str, Any]]
    stages: dict[str, TimeSpent]

    @classmethod
    def load(cls, run_dir: Path) -> RunData:
        """Read a run directory; raises FileNotFoundError when it is not one, DamagedFileError."""
        directory, paths = Path(run_dir), RunPaths(Path(run_dir))
        if not paths.config.exists():
            raise FileNotFoundError(f"{directory} is not a run directory: it has no {paths.config.name}")
        return cls(
            directory=directory,
            config=without_removed(read_mapping(paths.config)),
            environment=read_note(paths.environment, dict, {}, "the machine of the run is unknown"),
            metrics=_printable(read_metrics(directory)),
            sft=_printable(read_metrics(directory, SFT_METRICS)),
            stages=read_stages(directory),
        )

    @cached_property
    def names(self) -> list[str]:
        """Every metric that occurs, sorted."""
        return sorted(set().union(*self.metrics, *self.sft) - {"step"})

    @property
    def last_step(self) -> int:
        """The last RL step with metrics; 0 without any."""
        return max((record["step"] for record in self.metrics), default=0)

    def until(self, step: int) -> RunData:
        """The run as it was after that step: without later metrics."""
        return replace(self, metrics=[record for record in self.metrics if record["step"] <= step])

    @property
    def accuracy_names(self) -> list[str]:
        """`val/<data_source>/acc/mean@k` metrics, one per evaluated data source and k."""
        return [name for name in self.names if ACCURACY.fullmatch(name)]

    @cached_property
    def engines(self) -> dict[str, Series]:
        """`engine/<i>`: its trajectories in flight, over minutes."""
        found = engine_occupancy(self.directory)
        return {f"{ENGINE}{engine}": Series(minutes, in_flight) for engine, (minutes, in_flight) in found.items()}

    @cached_property
    def engines_idle(self) -> float | None:
        """Share of the RL steps' time in which an engine has nothing in flight, mean over engines; None: no record."""
        import numpy as np  # keeps the command line fast

        at, busy = _occupancy_rows(self.directory)
        steps = [record.get("time/step") or 0.0 for record in self.metrics if record["step"] > 0]
        if not len(at) or not sum(steps):
            return None
        # While the trainer computes there may be no row for a step; a longer gap is one between two runs.
        lasts = np.minimum(np.diff(at), max(_SILENT_S, *steps))
        # What is earlier than the sum of the steps was before the first RL step.
        after = lasts[::-1].cumsum()[::-1] - lasts
        lasts = np.clip(sum(steps) - after, 0.0, lasts)
        return float(lasts @ (busy[:-1] == 0).mean(axis=1) / lasts.sum())

    def series(self, name: str) -> Series | None:
        """A metric over steps (`sft/*` from sft.jsonl), or None when it has no finite value."""
        if name.startswith(ENGINE):
            return self.engines.get(name)
        records = self.sft if name.startswith("sft/") else self.metrics
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        return Series([step for step, _ in points], [value for _, value in points]) if points else None

    def by_rank(self, name: str) -> dict[int, dict[int, float]]:
        """Step -> rank -> value of a metric with `<r>` in its name for the rank; steps without any are omitted."""
        pattern = re.compile(re.escape(name).replace("<r>", r"(\d+)"))
        ranks = {metric: int(match[1]) for metric in self.names if (match := pattern.fullmatch(metric))}
        steps = {
            record["step"]: {rank: record[metric] for metric, rank in ranks.items() if record.get(metric) is not None}
            for record in self.metrics
        }
        return {step: dict(sorted(values.items())) for step, values in steps.items() if values}

    def setting(self, dotted: str, default: Any = None) -> Any:
        """A value of config.yaml by dotted key, or the default."""
        node: Any = self.config
        for key in dotted.split("."):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node


def _printable(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names of metrics come from data and users' code, also by way of another user's run."""
    return [{printable(name): value for name, value in record.items()} for record in records]


def _occupancy_rows(run_dir: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds since the first row, `[rows]`, and trajectories in flight, `[rows, engines]`.

    Empty without a file, or when its rows cover no time. Ignores incomplete rows and rows with another number of
    engines than the last one (the run was resumed with others).
    """
    import numpy as np  # keeps the command line fast

    nothing = np.zeros(0), np.zeros((0, 0))
    path = RunPaths(run_dir).logs.occupancy
    text = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
    rows = [line.split(",") for line in text[: text.rfind("\n") + 1].splitlines()]
    rows = [row for row in rows if len(row) == len(rows[-1])]
    if len(rows) < 2:
        return nothing
    try:
        table = np.array(rows, dtype=float)
    except ValueError as error:
        log.warning("%s is damaged (%s): the report goes without it", path, error)
        return nothing
    at = np.maximum.accumulate(table[:, 0] - table[0, 0])  # the clock may have been set back
    return (at, table[:, 1:]) if at[-1] > 0 else nothing


def engine_occupancy(run_dir: Path) -> dict[int, tuple[list[float], list[float]]]:
    """Engine -> minutes since the first row, and trajectories in flight, each a mean over a few seconds or more."""
    import numpy as np

    at, busy = _occupancy_rows(run_dir)
    if not len(at):
        return {}
    # Trajectories in flight, integrated over time: differences of the integral are exact means over any interval,
    # however the rows are spaced. A long gap adds nothing after its first seconds.
    lasts = np.diff(at, append=at[-1])
    area = np.vstack([np.zeros(busy.shape[1]), np.cumsum(busy * np.minimum(lasts, _SILENT_S)[:, None], axis=0)[:-1]])
    edges = np.linspace(0.0, at[-1], min(_POINTS, max(2, int(at[-1] / 2))) + 1)
    middles = ((edges[1:] + edges[:-1]) / 120).tolist()
    return {
        engine: (middles, (np.diff(np.interp(edges, at, area[:, engine])) / np.diff(edges)).tolist())
        for engine in range(busy.shape[1])
    }
