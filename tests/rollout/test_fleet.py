"""The fleet with a real vLLM engine in Ray: exact tokens, true log-probabilities, weight updates, and faults."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from ctpo_megatron.data.records import Group, Prompt, Trajectory
from ctpo_megatron.rollout import Cancelled, GroupFailed, RolloutFleet, Sampling, WeightSyncError, rollout_metrics
from tests.rollout.fleet_helpers import MAX_RESPONSE, MAX_TURN, make_config, scripted_tool
from tests.rollout.tiny_model import CALL, build_tiny_model

pytestmark = pytest.mark.timeout(600)


class Stage:
    """A running fleet with what the tests compare it to."""

    def __init__(self, root: Path) -> None:
        self.path, self.flag = root / "model", root / "flag"
        favour = {CALL: 9.0, "<|im_end|>": 7.0}
        self.tokenizer, self.model = build_tiny_model(self.path, favour=favour)
        self.version = 0
        self.config = make_config(self.path, root)
        self.fleet = RolloutFleet(self.config, str(self.path), 7, "unused", tool_factory=scripted_tool(self.flag))
        self.fleet.start()

    def prompts(self, count: int, length: int = 40) -> list[Prompt]:
        generator = torch.Generator().manual_seed(count)
        rows = torch.randint(0, 256, (count, length), generator=generator).tolist()
        return [Prompt(f"p{i}", "test", (), "", tuple(row)) for i, row in enumerate(rows)]

    def sync(self, scale: float) -> None:
        """Move every weight a little, deterministically, and hand the result to the engines."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        self.version += 1
        self.fleet.sync(self.model.state_dict().items(), self.version)

    def generate(self, prompts: Sequence[Prompt], step: int = 0, samples: int = 4, **sampling: Any) -> list[Group]:
        return self.fleet.generate(prompts, step=step, samples=samples, sampling=Sampling(**sampling))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("fleet"))
    try:
        stage.fleet.wait_ready()
        yield stage
    finally:
        stage.fleet.close()


def trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def tokens(groups: Sequence[Group]) -> list[list[int]]:
    return [trajectory.token_ids for trajectory in trajectories(groups)]


def largest_log_prob_error(model: Qwen3ForCausalLM, groups: Sequence[Group], temperature: float = 1.0) -> float:
    worst = 0.0
    for trajectory in trajectories(groups):
        ids = torch.tensor([trajectory.token_ids])
        with torch.no_grad():
            log_probs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
        want = log_probs.gather(1, ids[0, 1:, None])[:, 0]
        have = torch.tensor(trajectory.rollout_log_probs[1:])
        mask = torch.tensor(trajectory.response_mask[1:], dtype=torch.bool)
        worst = max(worst, float((want - have)[mask].abs().max()))
    return worst


def test_groups_are_complete_and_exact(stage: Stage) -> None:
    prompts = stage.prompts(6)
    groups = stage.generate(prompts)
    stop = stage.tokenizer.eos_token_id
    assert [group.prompt.id for group in groups] == [prompt.id for prompt in prompts]
    for group in groups:
        assert [t.sample_index for t in group.trajectories] == [0, 1, 2, 3]
        for trajectory in group.trajectories:
            n = len(group.prompt.token_ids)
            assert tuple(trajectory.token_ids[:n]) == group.prompt.token_ids
            assert trajectory.response_tokens <= MAX_RESPONSE
            for turn in range(1, max(trajectory.turn) + 1):
                rows = [i for i, t in enumerate(trajectory.turn) if t == turn]
                sampled = [trajectory.token_ids[i] for i in rows if trajectory.response_mask[i]]
                assert 1 <= len(sampled) <= MAX_TURN
                assert stop not in sampled[:-1]
            ends = {"answer": True, "max_turns": True, "length": trajectory.tool_calls and sampled[-1] == stop}
            assert (sampled[-1] == stop) == bool(ends[str(trajectory.finish_reason)])
            if trajectory.finish_reason == "answer":
                assert stage.tokenizer.decode(sampled[:-1]) == trajectory.final_text
    metrics = rollout_metrics(groups)
    assert metrics["sandbox/calls"] > 0
    assert metrics["rollout/tool_use"] > 0
    assert metrics["rollout/turns_mean"] > 1
    assert stage.fleet.stats()["group_retries"] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_log_probs_is_the_models(stage: Stage, temperature: float) -> None:
    groups = stage.generate(stage.prompts(3), step=1, temperature=temperature)
    assert largest_log_prob_error(stage.model, groups, temperature) <= 1e-4


def test_log_probs_is_of_the_filtered_distribution(stage: Stage) -> None:
    [trajectory] = stage.generate(stage.prompts(1), step=2, samples=1, top_k=1)[0].trajectories
    assert [
        p for p, m in zip(trajectory.rollout_log_probs, trajectory.response_mask, strict=True) if m and p != 0.0
    ] == []


def test_same_seed_same_tokens_and_other_step_other_tokens(stage: Stage) -> None:
    prompts = stage.prompts(8)
    first = tokens(stage.generate(prompts, step=3))
    stage.sync(0.0)  # same weights, empty prefix cache
    assert tokens(stage.generate(prompts, step=3)) == first
    assert tokens(stage.generate(prompts[::-1], step=3)) == [
        ids for i in range(7, -1, -1) for ids in first[4 * i : 4 * i + 4]
    ]
    assert tokens(stage.generate(prompts, step=4)) != first


def test_sync_changes_what_is_sampled_and_forgets_cached_prefixes(stage: Stage) -> None:
    prompts = stage.prompts(3, length=100)
    before = stage.generate(prompts, step=5)
    stage.sync(0.02)
    after = stage.generate(prompts, step=5)
    assert tokens(after) != tokens(before)
    versions = {v for t in trajectories(after) for v, m in zip(t.weight_version, t.response_mask, strict=True) if m}
    assert versions == {stage.version}
    assert largest_log_prob_error(stage.model, after) <= 1e-4
    assert not list(Path("/dev/shm").glob(f"ctpo-weights-{os.getpid()}-*"))


def test_sync_refuses_an_incomplete_state_dict(stage: Stage) -> None:
    state = dict(stage.model.state_dict())
    state.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(WeightSyncError, match="up_proj"):
        stage.fleet.sync(state.items(), 99)


def test_prompt_without_room_is_named(stage: Stage) -> None:
    with pytest.raises(ValueError, match="'p0' has 320 tokens"):
        stage.generate(stage.prompts(1, length=320))


def test_sampling_can_be_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctpo_megatron.rollout.dispatch._TURN_S", 0.001)  # sooner than the first token
    prompts = stage.prompts(2)
    asked = iter([False, False, True])
    with pytest.raises(Cancelled, match="2 of 2 groups were not sampled"):
        stage.fleet.generate(prompts, step=10, samples=2, sampling=Sampling(), cancelled=lambda: next(asked))
    assert [len(group.trajectories) for group in stage.generate(prompts, step=10)] == [4, 4]


def test_unavailable_tool_means_retry_not_reward(stage: Stage) -> None:
    prompts = stage.prompts(2)
    want = tokens(stage.generate(prompts, step=6))
    stage.fleet.stats()
    stage.flag.write_text("1")
    assert tokens(stage.generate(prompts, step=6)) == want
    stats = stage.fleet.stats()
    assert (stats["group_retries"], stats["lost_infrastructure_error"]) == (1, 1)
    stage.flag.write_text("1000000")
    with pytest.raises(GroupFailed, match=r"prompt 'p\d' failed 3 times.*connection refused"):
        stage.generate(prompts, step=6)
    stage.flag.write_text("0")
    assert tokens(stage.generate(prompts, step=6)) == want


def engine_processes(name: str) -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if name in " ".join(child.cmdline())]


def kill_soon(name: str, delay_s: float) -> threading.Timer:
    [victim] = engine_processes(name)
    timer = threading.Timer(delay_s, victim.send_signal, [signal.SIGKILL])
    timer.start()
    return timer


@pytest.mark.parametrize("victim", ["ray::RolloutEngine", pytest.param("VLLM::EngineCore", marks=pytest.mark.slow)])
def test_killed_engine_comes_back_with_current_weights(stage: Stage, victim: str) -> None:
    prompts = stage.prompts(24)
    stage.sync(0.01)
    want = tokens(stage.generate(prompts, step=8))
    old = {process.pid for name in ("ray::RolloutEngine", "VLLM::EngineCore") for process in engine_processes(name)}
    stage.fleet.stats()
    timer = kill_soon(victim, 0.1)
    groups = stage.generate(prompts, step=8)
    timer.join(10)
    stats = stage.fleet.stats()
    assert stats["engine_restarts"] == 1
    assert stats["group_retries"] >= 1
    assert tokens(groups) == want
    assert {v for t in trajectories(groups) for v, m in zip(t.weight_version, t.response_mask, strict=True) if m} == {
        stage.version
    }
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in old) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in old if psutil.pid_exists(pid)]


@pytest.mark.slow
def test_engine_dead_before_a_sync_is_replaced(stage: Stage) -> None:
    [victim] = engine_processes("ray::RolloutEngine")
    victim.send_signal(signal.SIGKILL)
    stage.sync(0.01)
    assert largest_log_prob_error(stage.model, stage.generate(stage.prompts(2), step=9)) <= 1e-4
    assert stage.fleet.stats()["engine_restarts"] == 1
