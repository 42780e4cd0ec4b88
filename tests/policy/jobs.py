"""Runs the scenarios of this folder as a job of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import ranks as pool

Results = dict[str, dict[str, Any]]
Scenarios = dict[str, dict[str, Any]]


def run_job(main: Callable[[Path, Scenarios], Results | None], models_dir: Path, ranks: int, scenarios: Scenarios):
    """Run `main(models_dir, scenarios)` on `ranks` processes of one thread each; what rank 0 returned, by scenario."""
    return pool.run(main, models_dir, scenarios, ranks=ranks)[0]
