"""A rank that dies, hangs or fails ends the others, and is named; one that is only late is waited for."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.run import lost_ranks
from tests.run.lost_ranks import FATES, STEPS, TIMEOUT_S
from tests.support import ranks

pytestmark = pytest.mark.xdist_group("ranks")
RANKS = 3
REFUSED = "RankZeroError: rank {rank} stops, rank 0 failed: ValueError: runs/x exists"


@dataclass(frozen=True)
class Told:
    """How the ranks of a job have ended; of those that did not say it, nothing."""

    by_rank: dict[int, dict[str, Any]]
    pids: list[int]

    def error(self, rank: int) -> str:
        return str(self.by_rank[rank]["told"])

    def name(self, rank: int) -> str:
        """As messages name it."""
        return f"rank {rank} (process {self.pids[rank]} on {socket.gethostname()})"


def play(folder: Path, how: str) -> Told:
    lost, _, what = FATES[how]
    frozen = {lost} if what is lost_ranks.freeze else {lost} if what is lost_ranks.oversleep else set[int]()
    ended = ranks.endings(lost_ranks.main, folder, how, ranks=RANKS, deadline_s=90, lasting=frozen)
    files = {rank: folder / f"rank_{rank}.json" for rank in range(RANKS)}
    found = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
    return Told(found, [pid for _, pid in ended])


@pytest.mark.parametrize(
    "how", ["nothing", "rank zero acts for longer than a collective may take", "frozen for a moment"]
)
def test_a_rank_that_is_late_is_waited_for(tmp_path: Path, how: str) -> None:
    told = play(tmp_path, how)
    assert [told.by_rank[rank]["sums"] for rank in range(RANKS)] == [[float(RANKS)] * STEPS] * RANKS
    assert [told.error(rank) for rank in range(RANKS)] == [""] * RANKS
    assert not (tmp_path / "stalls" / "rank_1.txt").exists()  # it only waits


@pytest.mark.parametrize("how", ["killed while rank zero acts", "killed in a command"])
def test_a_rank_that_is_killed_is_named_at_once(tmp_path: Path, how: str) -> None:
    told = play(tmp_path, how)
    assert told.error(0) == f"RankLost: {told.name(1)}: gone; the cause is in the log of that rank"
    assert told.error(2).startswith("RankLost: ") and told.by_rank.keys() == {0, 2}


@pytest.mark.parametrize("how", ["frozen while rank zero acts", "frozen in a command", "asleep in a command"])
def test_a_rank_that_stands_still_is_named_by_the_time_out(tmp_path: Path, how: str) -> None:
    told = play(tmp_path, how)
    assert told.error(0).startswith(f"RankLost: {told.name(1)}: no answer to rank 0 within ")
    assert told.by_rank.keys() == {0, 2} and told.error(2).startswith("RankLost: ")
    assert TIMEOUT_S < told.by_rank[0]["seconds"] < 60
    stacks = (tmp_path / "stalls" / "rank_1.txt").read_text() if how.startswith("asleep") else "in oversleep"
    assert "in oversleep" in stacks


@pytest.mark.parametrize(
    "how", ["rank zero is killed", pytest.param("rank zero is frozen in a command", marks=pytest.mark.slow)]
)
def test_without_rank_zero_the_others_end(tmp_path: Path, how: str) -> None:
    told = play(tmp_path, how)
    assert told.by_rank.keys() == {1, 2}
    for rank in (1, 2):
        assert told.error(rank).startswith("RankLost: ") and told.name(0) in told.error(rank)


def test_what_rank_zero_raises_alone_ends_all(tmp_path: Path) -> None:
    told = play(tmp_path, "rank zero is wrong")
    assert told.error(0) == "ValueError: runs/x exists\nand more"
    assert [told.error(rank) for rank in (1, 2)] == [REFUSED.format(rank=rank) for rank in (1, 2)]


def test_what_a_rank_raises_in_a_command_ends_all(tmp_path: Path) -> None:
    """The others wait in a collective for it, and learn that it is gone."""
    told = play(tmp_path, "wrong in a command")
    assert told.error(1) == "ValueError: runs/x exists\nand more"
    assert told.error(0).startswith(f"RankLost: {told.name(1)}: gone")


def test_what_rank_zero_raises_in_a_command_ends_all(tmp_path: Path) -> None:
    told = play(tmp_path, "rank zero is wrong in a command")
    assert told.error(0) == "ValueError: runs/x exists\nand more"
    assert all(told.error(rank) for rank in (1, 2))
