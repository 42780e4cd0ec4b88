"""Writes a study: its tables at full precision as JSON, and its figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import write_json
from ctpo_megatron.theory.study import Study

TABLES, FIGURES = "theory.json", "figures"


def write_study(found: Study, folder: Path) -> list[Path]:
    """Write theory.json and the figures into an existing folder, replacing earlier ones; returns what was written.

    Raises OSError.
    """
    from ctpo_megatron.report import save_charts
    from ctpo_megatron.theory.figures import charts

    return [write_json(folder / TABLES, content(found)), *save_charts(charts(found), folder / FIGURES)]


def content(found: Study) -> dict[str, Any]:
    """Plain JSON: `settings`; `tables`, name -> title, says, columns and rows; the curves are one of them."""
    tables = {table.name: asdict(table) for table in (*found.tables, found.curves)}
    return {"settings": asdict(found.settings), "tables": tables}
