"""The trainer's ranks: what rank zero calls happens on all of them, and all of them end with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.run import ranks_scenario
from tests.support import ranks

pytestmark = pytest.mark.xdist_group("ranks")
SEEN = [(False, "rl"), (True, "rl")]


def run(tmp_path: Path, how: str) -> list[dict[str, Any]]:
    return ranks.run(ranks_scenario.main, tmp_path, how, ranks=2)


def test_every_rank_does_what_rank_zero_calls(tmp_path: Path) -> None:
    assert run(tmp_path, "ends") == [
        {"status": 7, "seen": SEEN, "stopped": False},
        {"status": 0, "seen": SEEN, "stopped": False},
    ]


def test_a_rank_that_is_to_stop_stops_all(tmp_path: Path) -> None:
    assert run(tmp_path, "stops") == [
        {"status": 7, "seen": SEEN, "stopped": True},
        {"status": 143, "seen": SEEN, "stopped": True},
    ]


def test_rank_zeros_failure_ends_the_others(tmp_path: Path) -> None:
    first, second = run(tmp_path, "fails")
    assert first["seen"] == second["seen"] == SEEN
    assert second["status"] == "rank 1 stops, rank 0 failed: Failed: no more prompts"
