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

import psutil
import pytest
import ray
import torch

from ctpo_megatron.base.processes import wait_for
from ctpo_megatron.base.stop import Cancelled
from ctpo_megatron.engines import EngineError
from ctpo_megatron.engines.weights import WeightOffer, tcp_transport
from ctpo_megatron.engines.weights.checksums import Checksums
from tests.engines.pool_helpers import Stage, engine_processes, largest_log_prob_error, versions
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
    assert users_stage.fleet._read_back.unchecked == []
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
    stage.send(state, stage.version)


class Stalled(Offer):
    """The first engine is told to fetch from where nothing comes."""

    def __init__(self, offer: WeightOffer, address: tuple[str, int]) -> None:
        super().__init__(offer)
        self._address, self._begun = address, 0

    def begin(self, update: Any) -> None:
        self._begun += 1
        if self._begun > 1:
            return self._offer.begin(update)
        message = self._offer.message  # type: ignore[attr-defined]
        shares = [(*self._address, share[2]) for share in message.shares]
        return update.tell({**vars(message), "shares": shares})  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_an_engine_that_fails_in_an_update_is_replaced(
    how: str, shared_ray: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = scaled(10)
    stage = Stage(tmp_path, weights={"transport": "tcp", "timeout_s": limit})
    try:
        stage.sync(0.01)
        [engine] = engine_processes(stage, "ray::RolloutEngine")

        def meet(mute: socket.socket) -> None:
            peer, _ = mute.accept()
            with peer:
                engine.send_signal(signal.SIGKILL if how == "dies" else signal.SIGSTOP)
                wait_for([engine], scaled(100))

        with socket.create_server(("127.0.0.1", 0)) as mute:
            thread = threading.Thread(target=meet, args=(mute,))
            thread.start()
            with stage.changed(lambda offer: Stalled(offer, mute.getsockname())):
                stage.sync(0.01)
                stage.fleet.wait_ready()  # the next process gets them from this transport
            thread.join(scaled(10))
        late = rf"has not loaded weights 2 in {limit:g} s \(rollout\.weights\.timeout_s\)" if how == "hangs" else ""
        assert re.search(rf"rollout engine 0 did not take weights 2: .*{late}", caplog.text)
        assert stage.fleet.stats()["engine_restarts"] == 1
        groups = stage.generate(stage.prompts(1), step=1)
        assert versions(groups) == {2} and largest_log_prob_error(stage.model, groups) <= 1e-4
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
            with pytest.raises(Cancelled, match=rf"waiting for rollout engine 0 to take weights {stage.version}"):
                stage.fleet.finish_update()
            with pytest.raises(Cancelled):  # the next update waits for it, too
                stage.begin_send(stage.state(), stage.version + 1)
            assert time.monotonic() < began + scaled(10)
    finally:
        actor.resume()
        stop.clear()
    assert stage.fleet.finish_update()
    assert stage.fleet.stats()["engine_restarts"] == 0
    assert versions(stage.generate(stage.prompts(1), step=14)) == {stage.version}


@pytest.mark.slow
def test_an_engine_that_comes_up_in_an_update_takes_the_new_weights(shared_ray: None, tmp_path: Path) -> None:
    """Of the former ones the transport has nothing left by then."""
    stage = Stage(tmp_path, weights={"transport": "tcp"})
    try:
        stage.sync(0.01)
        [engine] = stage.fleet.engines
        stage.fleet.restart(engine)
        ray.wait([engine.ready_ref], timeout=scaled(120))
        stage.sync(0.01)
        groups = stage.generate(stage.prompts(1), step=1)
        assert versions(groups) == {2} and largest_log_prob_error(stage.model, groups) <= 1e-4
        assert stage.fleet.stats()["engine_restarts"] == 1
    finally:
        stage.close()


@pytest.mark.slow
def test_no_update_waits_for_an_engine_that_is_replaced(
    shared_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one gets the weights of the time when it is up."""
    stage = Stage(tmp_path, engines=2, weights={"transport": "tcp"})
    fleet = stage.fleet
    try:
        fleet.wait_ready()
        with sent_bytes(monkeypatch) as sent:
            stage.sync(0.01)
        size = sum(tensor.nbytes for tensor in stage.state().values())
        assert 2 * size <= sum(sent) <= 2.2 * size  # each engine fetches them; and what is between tensors
        psutil.Process(ray.get(fleet.engines[1].ready_ref)[0]).kill()
        for stage.version in (2, 3):  # it dies in the first, and starts in the second
            stage.send(stage.state(), stage.version)
            assert [engine.live for engine in fleet.engines] == [True, False]
        fleet.wait_ready()  # for both
        assert [engine.live for engine in fleet.engines] == [True, True]
        groups = stage.generate(stage.prompts(6), step=1)
        assert versions(groups) == {3} and fleet.stats()["engine_restarts"] == 1
        assert largest_log_prob_error(stage.model, groups) <= 1e-4
    finally:
        stage.close()


@pytest.mark.slow  # the quickstart's model is tied: tests/end_to_end/test_ring.py compares every log-prob after a sync
def test_an_update_reaches_an_output_layer_that_is_the_embedding(shared_ray: None, tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"tie_word_embeddings": True})
    try:
        check_updates(stage)
    finally:
        stage.fleet.close()
