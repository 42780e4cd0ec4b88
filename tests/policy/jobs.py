"""Runs the scenarios of this folder as a job of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.support import ranks as pool

Results = dict[str, dict[str, Any]]
Scenarios = dict[str, dict[str, Any]]


def run_job(main: Callable[[Path, Scenarios], Results | None], models_dir: Path, ranks: int, scenarios: Scenarios):
    """Run `main(models_dir, scenarios)` on `ranks` processes of one thread each; what rank 0 returned, by scenario."""
    return pool.run(main, models_dir, scenarios, ranks=ranks)[0]


class Jobs:
    """Results by scenario; a job runs once, with all of its scenarios, when the first of them is asked for."""

    def __init__(self, run: Callable[[Scenarios], Results], *jobs: Scenarios) -> None:
        self._run = run
        self._jobs = [(scenarios, Future[Results]()) for scenarios in jobs]

    def __getitem__(self, name: str) -> dict[str, Any]:
        scenarios, results = next(job for job in self._jobs if name in job[0])
        if not results.done():
            try:
                results.set_result(self._run(scenarios))
            except Exception as failure:
                results.set_exception(failure)
        return results.result()[name]
