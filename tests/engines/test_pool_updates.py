"""Weight updates: that they reach layers which vLLM packs for CPU kernels, and that what does not is seen."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.base.processes import wait_for
from ctpo_megatron.base.stop import Cancelled, NeverStop
from ctpo_megatron.engines import EngineError
from ctpo_megatron.engines.weights import WeightOffer, tcp_transport
from ctpo_megatron.engines.weights.checksums import Checksums
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
    """Over TCP, and every tensor can be read back."""
    check_updates(users_stage)
    assert users_stage.fleet._unchecked == []
    stats = users_stage.fleet.stats()
    size = sum(tensor.nbytes for tensor in users_stage.state().values())
    assert stats["sync_bytes"] >= 2 * size and stats["sync_bytes"] % size == 0
    assert stats["sync_gb_per_s"] == stats["sync_bytes"] / 1e9 / stats["sync_s"]
    assert [name for name in stats if name.startswith("sync_by_")] == ["sync_by_tcp"]
    assert stats["sync_by_tcp"] == stats["sync_bytes"] / size


@contextmanager
def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many bytes this process sends to engines, request by request."""
    sent, send = list[int](), tcp_transport._send

    def counting(peer: socket.socket, content: memoryview) -> None:
        sent.append(len(content))
        send(peer, content)

    with monkeypatch.context() as patch:
        patch.setattr(tcp_transport, "_send", counting)
        yield sent


EXPERT = "model.layers.1.mlp.experts.2."
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "model.layers.0.self_attn.k_proj.weight": lambda rows: rows[[1, 0, *range(2, len(rows))]],
    "model.layers.1.self_attn.o_proj.weight": lambda rows: rows.flip(1),
    "model.layers.1.mlp.gate.weight": lambda rows: rows.flip(0),
    f"{EXPERT}gate_proj.weight": lambda stale: stale - 1e-4,
    f"{EXPERT}up_proj.weight": lambda stale: stale - 1e-4,
    f"{EXPERT}down_proj.weight": lambda stale: stale - 1e-4,
    "model.layers.1.self_attn.q_norm.weight": lambda numbers: numbers.flip(0) + torch.arange(len(numbers)) * 1e-3,
    "model.embed_tokens.weight": lambda rows: rows.roll(1, 0),
    "lm_head.weight": lambda rows: rows.roll(1, 0),
}


class Offer:
    """An offer with something changed."""

    def __init__(self, offer: WeightOffer) -> None:
        self._offer = offer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._offer, name)


class WithSums(Offer):
    """What the engines are to have sums up to this."""

    def __init__(self, offer: WeightOffer, sums: Any) -> None:
        super().__init__(offer)
        self.sums = sums


def test_other_values_in_an_engine_are_seen(users_stage: Stage) -> None:
    """Each a tensor that loads without complaint: rows in another order, an expert of an older version."""
    stage, state = users_stage, users_stage.state()
    honest = Checksums(stage.version, torch.float32)
    deque(honest.watch(state.items()), maxlen=0)
    changed = {name: change(state[name]).contiguous() for name, change in CHANGES.items()}
    with stage.changed(lambda offer: WithSums(offer, honest.sums)):
        with pytest.raises(EngineError, match=rf"engine 0 keeps other values .* in {len(CHANGES)} tensors, e\.g\. "):
            stage.send(state | changed, stage.version)
        for name in CHANGES:
            with pytest.raises(EngineError, match=rf"in 1 tensors, e\.g\. {name}; so it looks"):
                stage.send(state | {name: changed[name]}, stage.version)
        stage.begin_send(state | changed, stage.version)  # it is seen by who samples, too
        with pytest.raises(EngineError, match="engine 0 keeps other values"):
            stage.generate(stage.prompts(1), step=13)
        with pytest.raises(EngineError, match="engine 0 keeps other values"):
            stage.fleet.finish_update()
    stage.fleet.failure = None  # it would end a run
    stage.send(state, stage.version)


class Stalled(Offer):
    """The second engine is told to fetch from where nothing comes."""

    def __init__(self, offer: WeightOffer, address: tuple[str, int]) -> None:
        super().__init__(offer)
        self._address = address

    def begin(self, update: Any) -> None:
        message = self._offer.message  # type: ignore[attr-defined]
        shares = [(*self._address, share[2]) for share in message.shares]
        update.tell({**vars(message), "of": 2}, [{"number": 0}, {"number": 1, "shares": shares}])


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
            with stage.changed(lambda offer: Stalled(offer, mute.getsockname())):
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
def test_a_killed_engine_loses_no_group_and_no_update_waits_for_it(
    shared_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path, engines=2, weights={"transport": "tcp"})
    fleet, prompts = stage.fleet, stage.prompts(40)
    try:
        fleet.wait_ready()
        with sent_bytes(monkeypatch) as sent:
            stage.sync(0.01)
        size = sum(tensor.nbytes for tensor in stage.state().values())
        assert 2 * size <= sum(sent) <= 2.2 * size  # each engine fetches them; and what is between tensors
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
