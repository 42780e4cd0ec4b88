"""Tools, a parser and an environment from a file outside the package, in a real engine."""

from __future__ import annotations

import pytest

from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.rollouts import rollout_metrics
from tests.engines.pool_helpers import Stage, trajectories

pytestmark = pytest.mark.timeout(600)


def ids_of(trajectory: Trajectory, turn: int, *, by_model: bool) -> list[int]:
    """The tokens of a turn that the model has sampled, or the others."""
    tokens = trajectory.tokens
    found: list[int] = tokens["token_ids"][(tokens["turn"] == turn) & (tokens["response_mask"] == by_model)].tolist()
    return found


def test_a_users_parser_calls_two_tools_in_one_turn_and_words_the_answer(users_stage: Stage) -> None:
    groups = users_stage.generate(users_stage.prompts(6))
    tokenizer = users_stage.tokenizer
    seen = paused = 0
    for trajectory in trajectories(groups):
        for turn in {call.turn for call in trajectory.tool_calls if call.status == "success"}:
            python, add = (call for call in trajectory.tool_calls if call.turn == turn)
            assert (python.name, python.arguments, python.output) == ("code_interpreter", {"code": "print(1)"}, "1")
            assert (add.name, add.arguments, add.output) == ("add", {"a": 8, "b": 1}, "9")
            # The parser ended the turn behind its call, so the end token is not of the model.
            assert tokenizer.decode(ids_of(trajectory, turn, by_model=False)) == (
                "<|im_end|>\n<|im_start|>user\n<result>1</result><result>9</result><|im_end|>\n<|im_start|>assistant\n"
            )
            seen += 1
        for turn in range(1, max(trajectory.turn) + 1):
            said = tokenizer.decode(ids_of(trajectory, turn, by_model=True))
            assert "</tool_call>" not in said[: -len("</tool_call>")]
            paused += any(letter in said[:-1] for letter in "eao")
    assert paused > 0
    metrics = rollout_metrics(groups)
    assert metrics["tool/add/calls"] == metrics["tool/code_interpreter/calls"] == seen > 0


def test_a_users_environment_answers_with_user_turns(users_stage: Stage) -> None:
    prompts = [
        Prompt(prompt.id, "user turns", (), "", prompt.token_ids, {"again": "really?<|im_end|>"})
        for prompt in users_stage.prompts(6)
    ]
    tokenizer = users_stage.tokenizer
    end, asked = tokenizer.convert_tokens_to_ids("<|im_end|>"), 0
    for trajectory in trajectories(users_stage.generate(prompts, step=1)):
        assert trajectory.tool_calls == []
        for turn in range(1, max(trajectory.turn) + 1):
            if not (ids := ids_of(trajectory, turn, by_model=False)):
                continue
            # A turn that the parser ended behind a call has no end token of the model's.
            ended = end in ids_of(trajectory, turn, by_model=True)
            text = tokenizer.decode(ids).removeprefix("" if ended else "<|im_end|>")
            assert text == (f"\n<|im_start|>user\n{turn}: really?<|im_end|><|im_end|>\n<|im_start|>assistant\n")
            # What a user says is text: it cannot end its own message.
            assert ids.count(end) == 1 + (not ended)
            asked += 1
        if trajectory.finish_reason == "answer":
            assert max(trajectory.turn) == 3
        for position, by_model in enumerate(trajectory.response_mask):
            assert (trajectory.weight_version[position] >= 0) == bool(by_model)
    assert asked > 0
