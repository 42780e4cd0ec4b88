"""Spread of the log-ratio by position, from the dumps of a run: `python examples/ratios.py runs/quickstart`."""

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

for path in sorted(Path(sys.argv[1], "trajectories").glob("step_*.parquet")):
    table = pq.read_table(path, columns=["log_ratio", "response_mask"])
    traced = table.filter(table["log_ratio"].is_valid()).to_pylist()  # the last mini-batch
    rows = [np.compress(row["response_mask"], row["log_ratio"]) for row in traced]
    for position in (10, 30, 100, 300, 1000):
        values = [row[position - 1] for row in rows if len(row) >= position]
        if len(values) > 1:
            print(f"{path.stem}: model token {position}, {len(values)} trajectories, std {np.std(values, ddof=1):.4f}")
