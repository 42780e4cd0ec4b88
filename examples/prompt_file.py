"""Writes prompt files as `data.train` takes them (docs/data.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
"""Type of a column of conversations."""


def prompt_row(
    identity: str, data_source: str, question: str, ability: str, answer: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a row: one question of a user, with its ground truth."""
    return {
        "id": identity,
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": extra,
    }


def write_prompt_rows(rows: list[dict[str, Any]], extra: Sequence[tuple[str, pa.DataType]], file: Path) -> None:
    """Write rows of `prompt_row` as parquet. extra: names and types in `extra_info`."""
    columns = {
        "id": pa.string(),
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "ability": pa.string(),
        "reward_model": pa.struct([("ground_truth", pa.string()), ("style", pa.string())]),
        "extra_info": pa.struct(extra),
    }
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(columns)), file)
