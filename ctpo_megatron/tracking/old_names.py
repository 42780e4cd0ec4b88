"""Reads what earlier versions recorded: their names of metrics, files and stages, and the present ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctpo_megatron.base.run_paths import SFT_METRICS

OLD_FILES: Mapping[str, str] = {SFT_METRICS: "warmup.jsonl"}
"""File of a run directory -> what version 0.1 called it."""

OLD_STAGES: Mapping[str, str] = {"warmup": "sft"}
"""Stage of version 0.1 -> its name now."""

_OLD_PREFIXES: Mapping[str, str] = {
    "warmup/": "sft/",
    "mismatch/logp_abs_": "mismatch/log_prob_abs_",
    "throughput/anchor_": "throughput/old_log_probs_",
    "throughput/warmup_": "throughput/sft_",
    "time/anchor": "time/old_log_probs",
    "time/sync": "time/publish",
    "time/trace": "time/token_diagnostics",
    "time/warmup": "time/sft",
    "observe/": "tracking/",
}
"""How names of metrics of version 0.1 begin -> how the present ones do."""


def with_current_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics, of this or an earlier version, under the present names."""
    return {_current(name): value for name, value in record.items()}


def _current(name: str) -> str:
    for old, new in _OLD_PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
