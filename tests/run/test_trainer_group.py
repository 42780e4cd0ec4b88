"""The trainer's ranks: what rank zero calls happens on all of them, and all of them end with it."""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctpo_megatron.base.stop import NeverStop
from ctpo_megatron.engines.weights import EngineFacts
from ctpo_megatron.run import TrainerGroup
from tests.run import ranks_scenario
from tests.run.scripted_run import ONE_RANK
from tests.support import ranks
from tests.support.prefork import ROOT
from tests.tracking.synthetic_run import make_config

pytestmark = pytest.mark.xdist_group("ranks")
SEEN = [False, True]


def run(tmp_path: Path, how: str) -> list[dict[str, Any]]:
    return ranks.run(ranks_scenario.main, tmp_path, how, ranks=2)


def test_every_rank_does_what_rank_zero_calls(tmp_path: Path) -> None:
    assert run(tmp_path, "ends") == [
        {"status": 7, "seen": SEEN, "stopped": False},
        {"status": 0, "seen": SEEN, "stopped": False},
    ]


@pytest.mark.parametrize("how", ["stops", "stops waiting"])
def test_a_rank_that_is_to_stop_stops_all(tmp_path: Path, how: str) -> None:
    assert run(tmp_path, how) == [
        {"status": 7, "seen": SEEN, "stopped": True},
        {"status": 143, "seen": SEEN, "stopped": True},
    ]


def test_rank_zeros_failure_ends_the_others(tmp_path: Path) -> None:
    first, second = run(tmp_path, "fails")
    assert first["seen"] == second["seen"] == SEEN
    assert second["status"] == "rank 1 stops, rank 0 failed: Failed: no more prompts"


def test_what_is_chosen_is_for_the_smallest_gpu_and_on_every_rank(tmp_path: Path) -> None:
    """GPUs of 48 and 24 GiB."""
    shutil.copyfile(ROOT / "configs" / "models" / "qwen3_0_6b.json", tmp_path / "config.json")
    first, second = run(tmp_path, "settles")
    assert first["seen"] == second["seen"]
    ((tokens, recompute, gpu_gib),) = first["seen"]
    assert (recompute, gpu_gib) == ("full", 24) and tokens > 9216


@dataclass
class Leaving:
    """A trainer and its transport, which write down what is asked of them."""

    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_a_shared_gpu_gets_the_cache_back_before_engines_take_memory(mode: str, offload: str, tmp_path: Path) -> None:
    """For their weights, which are announced first, and for their cache, before which the trainer is released."""
    config = make_config(tmp_path, placement={"mode": mode}, policy={"offload": offload})
    group, trainer = TrainerGroup(config, ONE_RANK, NeverStop()), Leaving()  # type: ignore[arg-type]
    group.trainer = group.transport = trainer  # type: ignore[assignment]
    group.announce(1)
    group.release()
    cache = ["empty_cache"] * (mode == "colocated")
    assert trainer.calls == [*cache, "announce", "release", *cache]


def test_weights_are_served_at_the_configured_address(tmp_path: Path) -> None:
    config = make_config(tmp_path, cluster={"node_address": "127.0.0.2"})
    stop: Any = None
    with TrainerGroup(config, ONE_RANK, stop) as group:
        group.trainer = SimpleNamespace(weight_shapes=lambda: [("weight", (1,), torch.float32)])  # type: ignore[assignment]
        group.connect(EngineFacts(torch.float32, "127.0.0.1", "tcp"))
        transport: Any = group.transport
        assert transport._server.address[0] == "127.0.0.2"
        group.disconnect()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(transport._server.address)
