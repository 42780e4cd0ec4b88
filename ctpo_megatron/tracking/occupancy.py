"""How busy the engines were over time, from the rows that the rollouts write."""

from __future__ import annotations

import logging
from pathlib import Path

from ctpo_megatron.base.run_paths import RunPaths

log = logging.getLogger(__name__)

_POINTS = 300
_SILENT_S = 30.0
"""A gap between rows of at least this many seconds means that the run was not running."""


def engine_occupancy(run_dir: Path) -> dict[int, tuple[list[float], list[float]]]:
    """Engine -> minutes since the first row, and trajectories in flight, each a mean over a few seconds or more.

    Empty without a file, or when its rows cover no time. Ignores incomplete rows and rows with another number of
    engines than the last one (the run was resumed with others).
    """
    import numpy as np  # keeps the command line fast

    path = RunPaths(run_dir).logs.occupancy
    text = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
    rows = [line.split(",") for line in text[: text.rfind("\n") + 1].splitlines()]
    rows = [row for row in rows if len(row) == len(rows[-1])]
    if len(rows) < 2:
        return {}
    try:
        table = np.array(rows, dtype=float)
    except ValueError as error:
        log.warning("%s is damaged (%s): the report goes without it", path, error)
        return {}
    at, busy = np.maximum.accumulate(table[:, 0] - table[0, 0]), table[:, 1:]  # the clock may have been set back
    if not at[-1] > 0:
        return {}
    lasts = np.diff(at, append=at[-1])
    area = np.vstack([np.zeros(busy.shape[1]), np.cumsum(busy * np.minimum(lasts, _SILENT_S)[:, None], axis=0)[:-1]])
    edges = np.linspace(0.0, at[-1], min(_POINTS, max(2, int(at[-1] / 2))) + 1)
    middles = ((edges[1:] + edges[:-1]) / 120).tolist()
    return {
        engine: (middles, (np.diff(np.interp(edges, at, area[:, engine])) / np.diff(edges)).tolist())
        for engine in range(busy.shape[1])
    }
