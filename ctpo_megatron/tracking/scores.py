"""How the answers of a dump were scored, without reading their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.tracking.trajectories import each_record

_COLUMNS = ("prompt_id", "data_source", "answer", "reward")


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """answer: the ground truth of the prompt. reward: None without a verdict."""

    prompt_id: str
    data_source: str
    answer: str
    reward: float | None


def read_scores(path: Path) -> list[ScoredAnswer]:
    """The scores of one dump, in its order. Raises DamagedFileError."""
    without = []
    if path.suffix == ".parquet":
        from ctpo_megatron.tracking.parquet_dump import SCHEMA

        without = [name for name in SCHEMA.names if name not in _COLUMNS]
    records = each_record(path, without)
    return [ScoredAnswer(*(record[name] for name in _COLUMNS)) for record in records]
