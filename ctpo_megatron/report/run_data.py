"""Reads a run directory, for the terminal summary and the report."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import read_mapping, read_note
from ctpo_megatron.base.run_paths import SFT_METRICS, RunPaths
from ctpo_megatron.base.text import printable
from ctpo_megatron.config import without_removed
from ctpo_megatron.tracking import TimeSpent, read_metrics, read_stages

log = logging.getLogger(__name__)

ACCURACY = re.compile(r"val/(?P<source>.+)/acc/mean@\d+")


@dataclass(frozen=True)
class Series:
    """One metric over the steps with a finite value; never empty."""

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
        """Return the run as it was after that step: without later metrics."""
        return replace(self, metrics=[record for record in self.metrics if record["step"] <= step])

    @property
    def accuracy_names(self) -> list[str]:
        """`val/<data_source>/acc/mean@k` metrics, one per evaluated data source and k."""
        return [name for name in self.names if ACCURACY.fullmatch(name)]

    def series(self, name: str) -> Series | None:
        """Return a metric over steps (`sft/*` from sft.jsonl), or None when it has no finite value."""
        records = self.sft if name.startswith("sft/") else self.metrics
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        return Series([step for step, _ in points], [value for _, value in points]) if points else None

    def setting(self, dotted: str, default: Any = None) -> Any:
        """Return a value of config.yaml by dotted key, or the default."""
        node: Any = self.config
        for key in dotted.split("."):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node


def _printable(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names of metrics come from data and users' code, also by way of another user's run."""
    return [{printable(name): value for name, value in record.items()} for record in records]
