"""What the engines were busy with over time, from the rows that the rollouts write."""

from __future__ import annotations

import logging
from pathlib import Path

from ctpo_megatron.base.run_paths import RunPaths

log = logging.getLogger(__name__)

_POINTS = 300
_SILENT_S = 30.0
"""Without a row for so long nothing was in flight: the run was not there. While there is something, rows come."""


def engine_occupancy(run_dir: Path) -> dict[int, tuple[list[float], list[float]]]:
    """Engine -> minutes since the first row, and trajectories in flight, each a mean over a few seconds or more.

    Empty without a file, or when its rows cover no time. Rows of another number of engines than the last one has
    (the run was resumed with others), and one that was cut off, are left out.
    """
    import numpy as np  # which the command line does not pay for

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
    at, busy = np.maximum.accumulate(table[:, 0] - table[0, 0]), table[:, 1:]  # a clock may have been set back
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
