"""Dumps of a run as files that the authors' plot scripts read: `python examples/authors_npz.py runs/quickstart npz`.

Writes `npz/importance_weights/step_0000001_rank_0000.npz` and so on, one file a step: of the last mini-batch, where
ratios have moved furthest, or of all mini-batches whose ratios the dump has (`--all`; see `tracking.dump_every`).
Trajectories that no pass ran over are not in it. `log_ratio` is a key more than the scripts read: their ratio has a
floor at 1e-30.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import yaml

COLUMNS = ["dropped", "advantage", "turn", "response_mask", "log_ratio"]


def last_mini_batch(rows: list[dict], size: int) -> list[dict]:
    """The rows of the last optimizer step, of `size` trajectories."""
    trained = [row for row in rows if not row["dropped"]]
    return trained[(len(trained) - 1) // size * size :]


def arrays(rows: list[dict], step: int) -> dict[str, np.ndarray]:
    """What a file holds: `[B, T]` over the tokens after the prompt, padded with 0 on the right."""
    windows = [np.flatnonzero(np.array(row["turn"]) > 0) for row in rows]
    shape = len(rows), max(map(len, windows), default=0)
    log_ratio, advantages = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    mask = np.zeros(shape, np.int8)
    for place, (row, window) in enumerate(zip(rows, windows, strict=True)):
        here = slice(0, len(window))
        mask[place, here] = np.array(row["response_mask"])[window]
        log_ratio[place, here] = np.array(row["log_ratio"], np.float32)[window] * mask[place, here]
        advantages[place, here] = row["advantage"]
    weights = np.exp(np.minimum(log_ratio, 10.0)) * mask
    return {
        "pg_update_is_weights": weights.astype(np.float32),
        "response_mask": mask,
        "advantages": advantages,
        "log_ratio": log_ratio,
        "global_step": np.array([step], np.int64),
        "rank": np.array([0], np.int64),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--all", action="store_true", help="all mini-batches that have ratios")
    options = parser.parse_args()
    config = yaml.safe_load((options.run / "config.yaml").read_text())
    size = config["policy"]["mini_batch_prompts"] * config["rollout"]["samples_per_prompt"]
    folder = options.out / "importance_weights"
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((options.run / "trajectories").glob("step_*.parquet")):
        rows = pq.read_table(path, columns=COLUMNS).to_pylist()
        rows = rows if options.all else last_mini_batch(rows, size)
        traced = [row for row in rows if row["log_ratio"] is not None]
        if traced:
            step = int(path.stem.removeprefix("step_"))
            np.savez_compressed(folder / f"step_{step:07d}_rank_0000.npz", **arrays(traced, step))


if __name__ == "__main__":
    main()
