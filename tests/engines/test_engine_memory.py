"""What an engine and a fleet do to sleep, take weights, and wake."""

from __future__ import annotations

import asyncio
import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ctpo_megatron.config import Config
from ctpo_megatron.engines import RolloutEngine, engine_setup
from tests.engines.pool_helpers import Stage, largest_log_prob_error, tokens, versions


class RecordedLLM:
    """Writes down what is asked of vLLM's AsyncLLM; awake as vLLM 0.32 says: when weights and cache are."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.asleep: set[str] = set()

    async def sleep(self, *, level: int, mode: str) -> None:
        self.calls.append(("sleep", level))
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, *, tags: list[str]) -> bool:
        self.calls.append(("wake_up", tags))
        self.asleep -= set(tags)
        return not self.asleep

    async def collective_rpc(self, method: str) -> list[Any]:
        self.calls.append((method, ()))
        return [{"weight": [4, 7]}]

    async def is_paused(self) -> bool:
        last = [name for name, _ in self.calls if name in ("pause_generation", "resume_generation")][-1:]
        return last == ["pause_generation"]

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **keywords: Any) -> None:
            self.calls.append((name, arguments or keywords))

        return call


def recorded_calls(*, asleep: bool) -> list[str]:
    engine = object.__new__(RolloutEngine)  # without vLLM, which needs a GPU to sleep
    recorder = RecordedLLM()
    engine._llm, engine._asleep, engine._updated = recorder, False, asyncio.Condition()

    async def update() -> None:
        await engine.start_weight_update()
        await engine.receive_weights({"servers": []})
        await engine.finish_weight_update(3)

    async def step() -> None:
        if asleep:
            await engine.sleep(2)
            await engine.wake_up(["weights"])
        await update()
        if asleep:
            await engine.wake_up(["kv_cache"])
            await update()

    asyncio.run(step())
    return [f"{name} {detail}" if name in ("sleep", "wake_up") else name for name, detail in recorder.calls]


UPDATE = ["start_weight_update", "update_weights", "finish_weight_update", "ctpo_sums"]


def test_the_cache_comes_back_after_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing resumes sampling before it is there: vLLM does when all memory is."""
    receiver = SimpleNamespace(update_request=dict)  # vLLM takes eight seconds to import
    monkeypatch.setitem(sys.modules, "ctpo_megatron.engines.weights.receiver", receiver)
    awake = ["pause_generation", *UPDATE, "resume_generation"]
    assert recorded_calls(asleep=True) == ["sleep 2", "wake_up ['weights']", *UPDATE, "wake_up ['kv_cache']", *awake]
    assert recorded_calls(asleep=False) == awake


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_only_engines_that_share_gpus_can_sleep(mode: str) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "a", "steps": 1},
            "model": {"path": "m"},
            "data": {"train": ["t"]},
            "placement": {"mode": mode},
        }
    )
    assert engine_setup("cuda").arguments(config, "m")["enable_sleep_mode"] == (mode == "colocated")


@pytest.mark.timeout(600)
def test_a_fleet_sleeps_and_wakes(stage: Stage) -> None:
    """vLLM's own states, on a CPU, where nothing leaves the memory: what sleeps, wakes and samples, and with what."""
    prompts = stage.prompts(1)
    before, original = tokens(stage.generate(prompts, step=21)), copy.deepcopy(stage.model.state_dict())
    stage.fleet.sleep(1)
    stage.fleet.sleep(2)  # sleeps already
    stage.fleet.wake()
    assert tokens(stage.generate(prompts, step=21)) == before
    stage.fleet.sleep(2)
    stage.sync(0.001)  # seen by the bound below
    stage.fleet.wake()
    groups = stage.generate(prompts, step=21)
    assert versions(groups) == {stage.version}
    assert largest_log_prob_error(stage.model, groups) <= 1e-4
    stage.model.load_state_dict(original)  # other tests' prompts call the tool
    stage.sync(0.0)
