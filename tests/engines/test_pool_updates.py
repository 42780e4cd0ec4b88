"""Weight updates of real engines: they reach layers which vLLM packs for CPU kernels, and survive faults."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ctpo_megatron.base.stop import NeverStop
from ctpo_megatron.engines import EngineError
from tests.engines.pool_helpers import Stage, largest_log_prob_error, process_of, tokens, versions
from tests.support.deadlines import scaled

pytestmark = pytest.mark.timeout(600)


def test_an_update_reaches_experts(users_stage: Stage) -> None:
    """They are packed only once. A tied output layer, which is not sent: tests/end_to_end/test_ring.py."""
    for step in (11, 12):
        users_stage.sync(0.05)
        groups = users_stage.generate(users_stage.prompts(1), step=step)
        assert versions(groups) == {users_stage.version}
        assert largest_log_prob_error(users_stage.model, groups) <= 1e-4
    stats = users_stage.fleet.stats()
    size = sum(tensor.nbytes for tensor in users_stage.state().values())
    assert stats["sync_bytes"] >= 2 * size and stats["sync_bytes"] % size == 0
    assert [name for name in stats if name.startswith("sync_by_")] == ["sync_by_tcp"]
    assert stats["sync_by_tcp"] == stats["sync_bytes"] / size


def check_replaced(stage: Stage) -> None:
    """The second engine, which is being replaced, samples from the next update after it is up."""
    first, second = stage.fleet.engines
    groups = stage.generate(stage.prompts(6), step=1)
    assert versions(groups) == {stage.version} and largest_log_prob_error(stage.model, groups) <= 1e-4
    deadline = time.monotonic() + scaled(120)
    while not second.up and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [first.live, second.live] == [True, False]
    stage.sync(0.01)
    assert [first.live, second.live] == [True, True]
    groups = stage.generate(stage.prompts(40), step=2)  # more than one engine has room for
    assert versions(groups) == {stage.version} and largest_log_prob_error(stage.model, groups) <= 1e-4


@pytest.mark.slow
def test_a_killed_engine_loses_no_group_and_no_update_waits_for_it(shared_ray: None, tmp_path: Path) -> None:
    stage = Stage(tmp_path, engines=2, weights={"transport": "tcp"})
    fleet, prompts = stage.fleet, stage.prompts(40)
    try:
        fleet.wait_ready()
        stage.sync(0.01)
        want = tokens(stage.generate(prompts, step=8))
        fleet.stats()
        turns, deadline = stage.begin(prompts, step=8), time.monotonic() + scaled(60)
        while stage.sampler.in_flight < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        process_of(fleet.engines[1]).kill()
        assert tokens(turns.wait(NeverStop())) == want
        stats = fleet.stats()
        assert stats["engine_restarts"] == 1 and stats["group_retries"] >= 1
        stage.sync(0.01)
        assert [engine.live for engine in fleet.engines] == [True, False]
        check_replaced(stage)
    finally:
        stage.close()


@pytest.mark.slow
def test_sampling_ends_when_no_engine_is_left_with_the_weights(shared_ray: None, tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    try:
        stage.fleet.wait_ready()
        process_of(stage.fleet.engines[0]).kill()
        assert stage.generate(stage.prompts(2))  # a new process has the weights of the model directory
        stage.sync(0.01)
        process_of(stage.fleet.engines[0]).kill()
        with pytest.raises(EngineError, match=r"no engine is left that has weights 1, .*run\.resume=auto"):
            stage.generate(stage.prompts(2))
    finally:
        stage.close()
