"""The fleet with a real vLLM engine in Ray: exact tokens, true log-probabilities, weight updates, and faults."""

from __future__ import annotations

import time

import psutil
import pytest
import torch

from ctpo_megatron.base.stop import Cancelled
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import GroupTask, Sampling
from ctpo_megatron.rollouts import rollout_metrics
from tests.engines.pool_helpers import (
    MAX_RESPONSE,
    MAX_TURN,
    Stage,
    largest_log_prob_error,
    tokens,
    versions,
)
from tests.rollouts.scripted import Stops

pytestmark = pytest.mark.timeout(600)


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
    assert stage.fleet.stats().get("group_retries", 0) == 0


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:  # it has ended
        return ""


def test_an_engine_on_a_cpu_is_one_process(stage: Stage) -> None:
    """Our actor: vLLM by itself would start a core, and its CPU platform a worker beside it."""
    stage.fleet.wait_ready()
    actors = [process for process in psutil.Process().children(recursive=True) if "RolloutEngine" in title(process)]
    titles = [[title(child) for child in actor.children(recursive=True)] for actor in actors]
    assert actors and not any(titles), titles
    assert {actor.nice() for actor in actors} == {psutil.Process().nice()}  # Ray's default is 15 more


def test_an_engine_has_the_trainers_precision(stage: Stage) -> None:
    """vLLM's own `auto` would make this float32 model bfloat16."""
    config = stage.fleet._spec.config
    assert config.rollout.engine.dtype == "auto" and config.policy.dtype == "float32"
    assert stage.fleet.wait_ready().dtype == torch.float32


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_log_probs_is_the_models(stage: Stage, temperature: float) -> None:
    groups = stage.generate(stage.prompts(3), step=1, temperature=temperature)
    assert largest_log_prob_error(stage.model, groups, temperature) <= 1e-4


def test_log_probs_is_of_the_filtered_distribution(stage: Stage) -> None:
    [trajectory] = stage.generate(stage.prompts(1), step=2, samples=1, top_k=1)[0].trajectories
    assert [
        p for p, m in zip(trajectory.rollout_log_probs, trajectory.response_mask, strict=True) if m and p != 0.0
    ] == []


def test_the_time_in_which_engines_have_nothing_to_sample_is_counted(stage: Stage) -> None:
    stage.fleet.wait_ready()
    stage.fleet.stats()
    time.sleep(0.2)
    assert stage.fleet.stats()["engines_idle"] > 0.99
    stage.generate(stage.prompts(2), step=12)
    assert stage.fleet.stats()["engines_idle"] < 0.5


def test_same_seed_same_tokens_and_other_step_other_tokens(stage: Stage) -> None:
    prompts = stage.prompts(8)
    first = tokens(stage.generate(prompts, step=3))
    stage.sync(0.0)  # same weights, empty prefix cache
    assert tokens(stage.generate(prompts, step=3)) == first
    assert tokens(stage.generate(prompts[::-1], step=3)) == [
        ids for i in range(7, -1, -1) for ids in first[4 * i : 4 * i + 4]
    ]
    assert tokens(stage.generate(prompts, step=4)) != first


def test_a_prompt_that_is_drawn_twice_is_sampled_twice(stage: Stage) -> None:
    [prompt] = stage.prompts(1)
    once = stage.generate([prompt], step=7)
    first, second = stage.generate([prompt] * 2, step=7)
    assert tokens([first]) == tokens(once) and not {*map(tuple, tokens([second]))} & {*map(tuple, tokens(once))}


def test_a_sample_is_the_same_whatever_others_of_its_prompt_are_sampled(stage: Stage) -> None:
    """`ctpo eval` samples one by one what its store lacks."""
    [prompt] = stage.prompts(1)
    [group] = stage.generate([prompt])

    async def alone(index: int) -> list[Trajectory]:
        return await stage.sampler.sample(GroupTask(prompt, 0, (index,), Sampling()))

    found = [stage.loop.call(alone(index))[0] for index in (3, 1)]
    assert [t.token_ids for t in found] == [group.trajectories[n].token_ids for n in (3, 1)]
    assert [t.seed for t in found] == [group.trajectories[n].seed for n in (3, 1)]


def test_sync_changes_what_is_sampled_and_forgets_cached_prefixes(stage: Stage) -> None:
    prompts = stage.prompts(3, length=100)
    before = stage.generate(prompts, step=5)
    stage.sync(0.02)
    after = stage.generate(prompts, step=5)
    assert tokens(after) != tokens(before)
    assert versions(after) == {stage.version}
    assert largest_log_prob_error(stage.model, after) <= 1e-4


def test_sampling_can_be_given_up(stage: Stage) -> None:
    prompts = stage.prompts(2)
    stage.flag.write_text("hang")
    with pytest.raises(Cancelled, match="stop requested"):
        stage.begin(prompts, step=10).wait(Stops(False, True))
    stage.flag.write_text("0")
    assert not stage.sampler.in_flight
    assert [len(group.trajectories) for group in stage.generate(prompts, step=10)] == [4, 4]


def test_unavailable_tool_means_retry_not_reward(stage: Stage) -> None:
    prompts = stage.prompts(2)
    want = tokens(stage.generate(prompts, step=6))
    stage.fleet.stats()
    stage.flag.write_text("1")
    assert tokens(stage.generate(prompts, step=6)) == want
    stats = stage.fleet.stats()
    assert (stats["group_retries"], stats["lost_infrastructure_error"]) == (1, 1)


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("1000000", "connection refused"),
        ("bug", 'KeyError: "a bug in a user\'s tool" on rollout engine '),
        ("own error", r"OwnError: \ud800\x1b[2J on rollout engine "),
    ],
)
def test_a_prompt_that_fails_too_often_is_never_played_again(
    stage: Stage, failure: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    [prompt] = stage.prompts(1)
    want = tokens(stage.generate([prompt], step=6))
    stage.fleet.stats()
    stage.flag.write_text(failure)
    lost = Prompt(f"lost {failure}", "test", (), "", prompt.token_ids)
    assert stage.generate([lost], step=6) == []
    stage.flag.write_text("0")
    record = stage.sampler.quarantined[-1]
    assert (record.prompt_id, record.step) == (lost.id, 6)
    assert "failed 3 times" in record.cause
    assert cause in record.cause
    assert f"prompt {lost.id!r} (step 6)" in caplog.text
    stats = stage.fleet.stats()
    assert (stats["quarantined"], stats["group_retries"]) == (1, 2)
    groups = stage.generate([lost, prompt], step=6)
    assert [group.prompt.id for group in groups] == ["p0"]
    assert tokens(groups) == want
    stats = stage.fleet.stats()
    assert not {"quarantined", "group_retries"} & stats.keys()
