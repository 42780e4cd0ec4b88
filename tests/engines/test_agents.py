"""Agents in a real engine: the tokens of the built-in environment, sequences of their own, weights that change."""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import pytest

from ctpo_megatron.base.stop import NeverStop
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.rollouts import rollout_metrics
from tests.engines.pool_helpers import Stage, largest_log_prob_error, trajectories, versions

pytestmark = pytest.mark.timeout(600)


def prompts(stage: Stage, count: int, source: str, **extra: Any) -> list[Prompt]:
    made = []
    for number in range(count):
        messages = ({"role": "user", "content": f"Question {number}?"},)
        text = stage.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids = stage.tokenizer(text, add_special_tokens=False)["input_ids"]
        made.append(Prompt(f"q{number}", source, messages, "", tuple(ids), extra))
    return made


def test_an_agent_of_one_conversation_has_the_tokens_of_the_built_in_environment(stage: Stage) -> None:
    theirs = trajectories(stage.generate(prompts(stage, 6, "built in")))
    ours = trajectories(stage.generate(prompts(stage, 6, "agent")))
    compared = [
        (our, their)
        for our, their in zip(ours, theirs, strict=True)
        if all(call.status == "success" for call in their.tool_calls)  # an agent is not told why a call is malformed
    ]
    assert len(compared) > 12 and sum(their.turns > 1 for _, their in compared) > 3
    for our, their in compared:
        assert our.seed == their.seed and our.sequence_starts == []
        for column in ("token_ids", "turn", "response_mask", "loss_mask", "weight_version"):
            assert np.array_equal(our.tokens[column], their.tokens[column]), column
        assert np.allclose(our.tokens["rollout_log_probs"], their.tokens["rollout_log_probs"], atol=1e-5)
        assert our.finish_reason == their.finish_reason
        if their.finish_reason == "answer":
            assert our.final_text == their.final_text


def test_a_helper_has_a_sequence_of_its_own_in_the_same_trajectory(stage: Stage) -> None:
    groups = stage.generate(prompts(stage, 3, "agent", helper=True), step=1)
    assert all(len(trajectory.sequences) == 2 for trajectory in trajectories(groups))
    assert [len(group.trajectories) for group in groups] == [4, 4, 4]
    assert rollout_metrics(groups)["rollout/sequences_mean"] == 2.0
    assert largest_log_prob_error(stage.model, groups) <= 1e-4
    for trajectory in trajectories(groups):
        asked, helper = (stage.tokenizer.decode(trajectory.token_ids[part]) for part in trajectory.sequences)
        assert helper.startswith("<|im_start|>user\nHelp.<|im_end|>") and "Question" in asked and "Help" not in asked
        assert trajectory.turn[trajectory.sequences[1].start] == 0


def test_a_call_in_flight_during_an_update_takes_longer(stage: Stage) -> None:
    stage.sync(0.0)
    models, original = {stage.version: copy.deepcopy(stage.model)}, copy.deepcopy(stage.model.state_dict())
    turns = stage.begin(prompts(stage, 8, "agent", helper=True), step=2)
    for _ in range(3):
        time.sleep(0.1)
        stage.sync(0.02)
        models[stage.version] = copy.deepcopy(stage.model)
    groups = turns.wait(NeverStop())
    stage.model.load_state_dict(original)
    stage.sync(0.0)
    assert len(versions(groups)) > 1 and versions(groups) <= set(models)
    assert largest_log_prob_error(models, groups) <= 1e-4
    assert stage.fleet.stats().get("group_retries", 0) == 0
