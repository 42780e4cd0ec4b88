"""What becomes of an update, whatever carries it: the same twelve scenarios for every transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ctpo_megatron.base.stop import Cancelled
from ctpo_megatron.engines import EngineError
from tests.support.deadlines import scaled
from tests.weights.fleet import Communicator, Fleet, Process, Tensors, die, pretending
from tests.weights.sides import manifest_of

LEADS = {"tcp": False, "nccl": True, "ipc": True}
"""Whether the transport leads the engines: `send` returns when they have the weights."""


def of(version: int) -> Tensors:
    """Weights of a version: small and large, of two layers, in two dtypes."""
    generator = torch.Generator().manual_seed(version)
    tensors = {f"model.layers.{n // 2}.{n}.weight": torch.randn(40, n + 1, generator=generator) for n in range(5)}
    return tensors | {
        "model.embed_tokens.weight": torch.randn(64, 8, generator=generator),
        "model.norm.weight": torch.randn(8, generator=generator).bfloat16(),
    }


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * leads) for name, leads in LEADS.items()])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """vLLM, which the slow ones need, takes eight seconds to import."""
    if not LEADS[request.param]:
        yield request.param
        return
    with pretending(monkeypatch):
        yield request.param


@pytest.fixture
def make(transport: str, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def fleet(timeout_s: float = 20.0) -> Fleet:
        made.append(Fleet(tmp_path, transport, scaled(timeout_s)))
        return made[-1]

    yield fleet
    for each in made:
        each.close()


@pytest.fixture
def fleet(make: Callable[..., Fleet]) -> Fleet:
    return make()


def test_an_update_reaches_all_engines_bit_for_bit(fleet: Fleet) -> None:
    for version in (1, 2):
        fleet.send(of(version), version)
        assert all(fleet.holds(engine, of(version), version) for engine in (0, 1)) and fleet.live == [True, True]
    stats = fleet.pool.stats()
    size = sum(tensor.nbytes for tensor in of(1).values())
    assert (stats["sync_bytes"], stats[f"sync_by_{fleet.transport}"]) == (2 * size, 2)


def test_the_trainer_goes_on_while_engines_sample_and_take_what_was_sent(fleet: Fleet) -> None:
    """Once `send` has returned the weights may change; groups of the new version wait for the engine alone."""
    fleet.send(of(1), 1)
    released = threading.Event()
    if not LEADS[fleet.transport]:
        fleet.engines[1].process.meets = lambda _: _wait(released)
    tensors = of(2)
    fleet.begin(tensors, 2)
    for tensor in tensors.values():
        tensor.zero_()
    assert [engine.version for engine in fleet.engines] == [2, 2] and fleet.live == [True, True]
    assert fleet.engines[1].process.version == (2 if LEADS[fleet.transport] else 1)
    released.set()
    fleet.pool.finish_update()
    assert all(fleet.holds(engine, of(2), 2) for engine in (0, 1))


def _wait(event: threading.Event) -> None:
    event.wait(scaled(10))


def test_an_engine_that_died_before_takes_no_part(fleet: Fleet) -> None:
    fleet.send(of(1), 1)
    fleet.engines[1].end()
    fleet.send(of(2), 2)
    assert fleet.holds(0, of(2), 2) and fleet.live == [True, False]


def test_an_engine_that_dies_meanwhile_is_replaced_and_takes_the_next(fleet: Fleet) -> None:
    fleet.send(of(1), 1)
    fleet.engines[1].process.meets = die
    fleet.send(of(2), 2)
    assert any(fleet.holds(engine, of(2), 2) for engine in (0, 1))
    assert fleet.pool.stats()["engine_restarts"] >= 1 and fleet.pool.failure is None
    fleet.send(of(3), 3)
    assert all(fleet.holds(engine, of(3), 3) for engine in (0, 1)) and fleet.live == [True, True]


def test_an_engine_that_is_late_is_named_with_its_deadline_and_replaced(
    make: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    fleet, released = make(1.0), threading.Event()
    fleet.send(of(1), 1)
    fleet.engines[1].process.meets = lambda _: _wait(released)
    began = time.monotonic()
    fleet.send(of(2), 2)
    released.set()
    assert time.monotonic() < began + scaled(8)
    limit = f"{scaled(1.0):g} s (rollout.weights.timeout_s)"
    assert any("rollout engine 1" in line and limit in line for line in caplog.messages), caplog.messages
    assert any(fleet.holds(engine, of(2), 2) for engine in (0, 1))
    assert fleet.pool.stats()["engine_restarts"] >= 1


def test_a_stop_ends_the_wait_for_engines(fleet: Fleet) -> None:
    """One that fetches by itself has the weights later, and is not replaced meanwhile."""
    fleet.send(of(1), 1)
    released = threading.Event()
    fleet.engines[1].process.meets = lambda _: _wait(released)
    threading.Timer(0.3, fleet.stop.asked.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        fleet.send(of(2), 2)
    assert time.monotonic() < began + scaled(5)
    released.set()
    if not LEADS[fleet.transport]:
        fleet.stop.asked.clear()
        fleet.pool.finish_update()
        assert fleet.live == [True, True] and "engine_restarts" not in fleet.pool.stats()


def test_a_resumed_run_begins_with_a_later_version(fleet: Fleet) -> None:
    fleet.send(of(7), 7)
    assert all(fleet.holds(engine, of(7), 7) for engine in (0, 1)) and fleet.pool.version == 7


def test_a_tensor_of_another_dtype_is_refused_by_name(fleet: Fleet) -> None:
    fleet.send(of(1), 1)
    name = "model.layers.1.2.weight"
    with pytest.raises(ValueError, match=rf"{name} torch\.bfloat16"):
        fleet.begin(of(2), 2, lambda tensors: (tensors | {name: tensors[name].bfloat16()}).items())


def test_a_head_that_is_the_embedding_has_no_tensor_of_its_own(fleet: Fleet, tmp_path: Path) -> None:
    """Another tensor of the model that no update would change is named before anything is sent."""
    save_file(of(0) | {"lm_head.weight": torch.zeros(64, 8)}, tmp_path / "model.safetensors")
    manifest_of(of(1)).check_model(tmp_path)
    save_file({"up_proj": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(EngineError, match=r"1 tensors of .* are not sent, e\.g\. \['up_proj'\]"):
        manifest_of(of(1)).check_model(tmp_path)
    fleet.send(of(1), 1)
    assert all(fleet.holds(engine, of(1), 1) for engine in (0, 1))


def test_other_values_than_were_sent_end_the_sampling(fleet: Fleet) -> None:
    fleet.send(of(1), 1)
    fleet.engines[1].process.changed = "model.norm.weight"
    message = r"rollout engine 1 received other values than weights 2 have in 1 tensors, e\.g\. model\.norm\.weight"
    with pytest.raises(EngineError, match=message):
        fleet.send(of(2), 2)
    assert isinstance(fleet.pool.failure, EngineError)


def test_engines_that_sleep_wake_for_their_weights_only(fleet: Fleet) -> None:
    fleet.send(of(1), 1)
    for calls in fleet.calls:
        calls.clear()
    fleet.pool.sleep(2)
    fleet.send(of(2), 2)
    assert fleet.pool.is_asleep
    fleet.pool.wake()
    taken = ["start_weight_update", "receive_weights", "finish_weight_update"]
    for calls in fleet.calls:
        once = [call for number, call in enumerate(calls) if call not in calls[:number]]
        assert once == ["sleep 2", "wake weights", *taken, "wake kv_cache"]
    assert all(fleet.holds(engine, of(2), 2) for engine in (0, 1))


def test_engines_of_one_node_take_an_update_at_once(fleet: Fleet) -> None:
    """Neither waits for the other to have it."""
    met = threading.Barrier(2)

    def meet(process: Process) -> None:
        process.meets = lambda _: None
        met.wait(scaled(10))

    for engine in fleet.engines:
        engine.process.meets = meet
    fleet.send(of(1), 1)
    assert all(fleet.holds(engine, of(1), 1) for engine in (0, 1)) and not met.broken


def test_a_restarted_engine_gets_the_next_version(fleet: Fleet) -> None:
    fleet.send(of(1), 1)
    first = fleet.engines[0].process
    fleet.loop.do(lambda: fleet.pool._replace(fleet.engines[1]))
    assert fleet.live == [True, False]
    fleet.send(of(2), 2)
    assert all(fleet.holds(engine, of(2), 2) for engine in (0, 1)) and fleet.live == [True, True]
    assert fleet.engines[0].process is first
    if fleet.transport == "nccl":  # a group has the same members as long as it lasts
        assert [communicator.destroyed.is_set() for communicator in Communicator.made] == [True, False]


def test_a_transfer_that_the_trainer_breaks_off_raises_what_broke_it(fleet: Fleet) -> None:
    def broken(tensors: Tensors) -> Iterator[Any]:
        yield from list(tensors.items())[:3]
        raise RuntimeError("out of memory") if fleet.transport != "nccl" else MemoryError("out of memory")

    fleet.send(of(1), 1)
    began = time.monotonic()
    with pytest.raises((RuntimeError, MemoryError), match="out of memory"):
        fleet.begin(of(2), 2, broken)
    assert time.monotonic() < began + scaled(5)
