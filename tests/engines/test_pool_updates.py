"""Weight updates of real engines: they reach layers which vLLM packs for CPU kernels, and survive faults."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.processes import wait_for
from ctpo_megatron.base.stop import Cancelled, NeverStop
from ctpo_megatron.engines import EngineError
from ctpo_megatron.engines.weights import checksums
from tests.engines.pool_helpers import Stage, engine_processes, largest_log_prob_error, process_of, tokens, versions
from tests.support.deadlines import scaled

pytestmark = pytest.mark.timeout(600)


def check_updates(stage: Stage) -> None:
    """Experts are packed only once, and a tied output layer receives no weights of its own: both could stay behind."""
    for step in (11, 12):
        stage.sync(0.05)
        groups = stage.generate(stage.prompts(1), step=step)
        assert versions(groups) == {stage.version}
        assert largest_log_prob_error(stage.model, groups) <= 1e-4


def test_an_update_reaches_experts(users_stage: Stage) -> None:
    check_updates(users_stage)
    stats = users_stage.fleet.stats()
    size = sum(tensor.nbytes for tensor in users_stage.state().values())
    assert stats["sync_bytes"] >= 2 * size and stats["sync_bytes"] % size == 0
    assert stats["sync_gb_per_s"] == stats["sync_bytes"] / 1e9 / stats["sync_s"]
    assert [name for name in stats if name.startswith("sync_by_")] == ["sync_by_tcp"]
    assert stats["sync_by_tcp"] == stats["sync_bytes"] / size


def test_other_values_than_were_sent_are_seen(stage: Stage) -> None:
    """A number that changes on its way ends the sampling, too."""
    state = stage.state()
    name = "model.layers.1.self_attn.o_proj.weight"

    def changed(sums: checksums.Sums) -> checksums.Sums:
        size, total = sums[name]
        return sums | {name: (size, total + 1)}

    stage.sender.received = changed
    try:
        with pytest.raises(
            EngineError, match=rf"engine 0 received other values than weights .* in 1 tensors, e\.g\. {name}"
        ):
            stage.send(state, stage.version)
        stage.begin_send(state, stage.version)  # it is seen by who samples, too
        with pytest.raises(EngineError, match="engine 0 received other values"):
            stage.generate(stage.prompts(1), step=13)
        with pytest.raises(EngineError, match="engine 0 received other values"):
            stage.fleet.finish_update()
    finally:
        stage.sender.received = lambda sums: sums
        stage.fleet.failure = None  # it would end a run
    stage.send(state, stage.version)


@contextmanager
def stalled(stage: Stage, address: tuple[str, int]) -> Iterator[None]:
    """The second engine is told to fetch from where nothing comes."""
    second = stage.fleet.engines[1]
    call = second.call

    def misled(method: str, *arguments: Any) -> Any:
        if method == "update_weights":
            arguments = ({**arguments[0], "servers": [address]}, *arguments[1:])
        return call(method, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second, "call", misled)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_an_engine_that_fails_in_an_update_is_replaced_and_takes_the_next(
    how: str, shared_ray: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = scaled(10)
    stage = Stage(tmp_path, engines=2, weights={"transport": "tcp", "timeout_s": limit})
    try:
        stage.sync(0.01)
        engines = stage.fleet.engines
        victim = process_of(engines[1])

        def meet(mute: socket.socket) -> None:
            peer, _ = mute.accept()
            with peer:
                victim.send_signal(signal.SIGKILL if how == "dies" else signal.SIGSTOP)
                wait_for([victim], scaled(100))

        with socket.create_server(("127.0.0.1", 0)) as mute:
            thread = threading.Thread(target=meet, args=(mute,))
            thread.start()
            with stalled(stage, mute.getsockname()):
                stage.sync(0.01)
            thread.join(scaled(10))
        late = rf"within {limit:g} s \(rollout\.weights\.timeout_s\)" if how == "hangs" else ""
        assert re.search(rf"rollout engine 1 did not take weights 2: .*{late}", caplog.text)
        assert [engine.live for engine in engines] == [True, False]
        assert stage.fleet.stats()["engine_restarts"] == 1
        check_replaced(stage)
    finally:
        stage.close()


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
        [engine] = stage.fleet.engines if stage.fleet.wait_ready() else []
        process_of(engine).kill()
        assert stage.generate(stage.prompts(2))  # a new process has the weights of the model directory
        stage.sync(0.01)
        process_of(engine).kill()
        with pytest.raises(EngineError, match=r"no engine is left that has weights 1, .*run\.resume=auto"):
            stage.generate(stage.prompts(2))
    finally:
        stage.close()


def test_a_stop_ends_the_wait_for_an_engine_that_is_frozen(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may have the weights later, and is not replaced meanwhile."""
    stage.sync(0.0)
    [actor] = engine_processes(stage, "ray::RolloutEngine")
    stop = threading.Event()
    stage.fleet.stats()
    actor.suspend()
    try:
        stage.version += 1
        with monkeypatch.context() as patch:
            patch.setattr(stage.fleet, "_stop", stop)
            stage.begin_send(stage.state(), stage.version)
            threading.Timer(1.0, stop.set).start()
            began = time.monotonic()
            with pytest.raises(Cancelled, match=rf"waiting for engines to take weights {stage.version}"):
                stage.fleet.finish_update()
            with pytest.raises(Cancelled):  # the next update waits for it, too
                stage.begin_send(stage.state(), stage.version + 1)
            assert time.monotonic() < began + scaled(10)
    finally:
        actor.resume()
        stop.clear()
    stage.fleet.finish_update()
    assert stage.fleet.stats()["engine_restarts"] == 0
    assert versions(stage.generate(stage.prompts(1), step=14)) == {stage.version}


@pytest.mark.slow  # the quickstart's model is tied: tests/end_to_end/test_ring.py compares every log-prob after a sync
def test_an_update_reaches_an_output_layer_that_is_the_embedding(shared_ray: None, tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"tie_word_embeddings": True})
    try:
        check_updates(stage)
    finally:
        stage.fleet.close()
