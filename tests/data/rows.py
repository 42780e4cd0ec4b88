"""Rows of prompt files, and files of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def row(question: str = "1+1?", truth: str = "2", **changes: Any) -> dict[str, Any]:
    """One that has everything a prompt needs."""
    cells = {"data_source": "u", "prompt": [{"role": "user", "content": question}]}
    return cells | {"reward_model": {"ground_truth": truth}} | changes


def write(path: Path, *rows: Any) -> str:
    """A file of these rows, parquet or JSON lines by its name, in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return str(path)
