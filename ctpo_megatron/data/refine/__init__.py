"""Turns a raw collection of problems into prompt files: cleaned, deduplicated and checked against evaluation files."""

from ctpo_megatron.data.refine.pipeline import Refined, Settings, refine, report_json, report_rows
from ctpo_megatron.data.refine.problems import (
    COLUMNS,
    Dropped,
    RawProblem,
    read_held_out,
    read_problems,
    write_prompts,
)

__all__ = [
    "COLUMNS",
    "Dropped",
    "RawProblem",
    "Refined",
    "Settings",
    "read_held_out",
    "read_problems",
    "refine",
    "report_json",
    "report_rows",
    "write_prompts",
]
