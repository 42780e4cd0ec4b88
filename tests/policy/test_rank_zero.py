"""What rank 0 does alone: the others get its result, or stop with it in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job

from ctpo_megatron.policy import Layout, RankZeroError, parallel


def layout(rank: int) -> Layout:
    alone = {f"{kind}_{what}": size for kind in ("tp", "pp", "cp", "ep") for what, size in (("rank", 0), ("size", 1))}
    return Layout(rank=rank, world_size=2, dp_rank=rank, dp_size=2, device=torch.device("cpu"), **alone)


def refuse() -> str:
    raise ValueError("runs/x exists\nand more")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What rank 0 broadcast, in a process that plays both ranks after each other."""
    box: list[Any] = []

    def broadcast(value: Any, group: object = None) -> Any:
        if value != (None, None):  # the placeholder of a rank that receives
            box.append(value)
        return box[-1]

    monkeypatch.setattr(parallel, "broadcast_object", broadcast)
    return box


def test_every_rank_has_the_result_of_the_first(sent: list[Any]) -> None:
    assert [layout(0).first(lambda: "done"), layout(1).first(refuse)] == ["done", "done"]


def test_the_first_raises_and_the_others_stop_with_it(sent: list[Any]) -> None:
    with pytest.raises(ValueError, match="runs/x exists"):
        layout(0).first(refuse)
    with pytest.raises(RankZeroError) as caught:
        layout(1).first(refuse)
    assert str(caught.value) == "rank 1 stops, rank 0 failed: ValueError: runs/x exists"


def test_it_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    settings = {"timeout_s": 3.0, "work_s": 6.0}
    assert run_job("wait_scenario.py", tmp_path, tmp_path / "found.pt", 2, settings) == ["done", "done"]
