"""`positions.jsonl` of a run: statistics by position of every step, which survive crashes and resumes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import append_text
from ctpo_megatron.base.run_paths import POSITIONS
from ctpo_megatron.tracking.metrics import read_metrics, set_aside_after


class PositionsWriter:
    """Appends `{"step": n, "mini_batch": "all", ...}`, a line for each record of a step."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / POSITIONS
        self.truncate_after(sys.maxsize)  # drops a half-written last line

    def log(self, step: int, records: Mapping[str, Mapping[str, Any]]) -> None:
        """records: mini-batch (`first`, `last`, `all`) -> `PositionStats.record`. Raises OSError, naming the file."""
        each = ({"step": step, "mini_batch": of} | dict(record) for of, record in records.items())
        lines = (json.dumps(record, separators=(",", ":")) + "\n" for record in each)
        append_text(self.path, "".join(lines))

    def truncate_after(self, step: int) -> None:
        """Set aside the lines beyond `step`, which a run resumed from that step will write again."""
        if self.path.exists():
            set_aside_after(self.path, step)


def read_positions(run_dir: Path, mini_batch: str = "all") -> Iterator[dict[str, Any]]:
    """The records of one mini-batch (`first`, `last`) or of all of a step, in step order; none without a file."""
    return (record for record in read_metrics(run_dir, POSITIONS) if record["mini_batch"] == mini_batch)
