"""Episodes against a scripted engine: budgets, endings, and the token record that training relies on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ctpo_megatron.data.records import Trajectory
from ctpo_megatron.environments.episode import EpisodeFailed, Limits, ModelTurn, PromptTooLong, run_episode
from ctpo_megatron.environments.seeds import turn_seed
from ctpo_megatron.environments.tools import ToolUnavailable

STOP = 0
CALL = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(1)"}}</tool_call>'
PIECES = {1: "a", 2: "b", 10: CALL, 11: "<tool_call>oops</tool_call>", 12: "<tool_call>"}


class Codec:
    stop_ids = frozenset({STOP})

    def __init__(self, observation_length: int = 3) -> None:
        self.observation_length = observation_length
        self.seen: list[str] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(PIECES[t] for t in token_ids)

    def observation_ids(self, text: str) -> list[int]:
        self.seen.append(text)
        return [99] * self.observation_length


class Engine:
    """Plays scripted turns, cut to the budget it is given, and notes what it was asked."""

    def __init__(self, *turns: list[int]) -> None:
        self.turns = list(turns)
        self.asked: list[tuple[list[int], int, int]] = []

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> ModelTurn:
        self.asked.append((list(token_ids), max_tokens, seed))
        turn = self.turns.pop(0)[:max_tokens]
        n = len(self.asked)
        return ModelTurn(turn, [-0.5 * n] * len(turn), [n + 6] * len(turn))


async def tool(code: str) -> Any:
    return SimpleNamespace(status="success", stdout="1\n", stderr="", wall_s=0.0)


def play(
    engine: Engine, codec: Codec | None = None, run_tool: Any = tool, prompt: Sequence[int] = (5, 6), **limits: Any
) -> Trajectory:
    settings = {
        "max_turns": 3,
        "max_turn_tokens": None,
        "max_response_tokens": 100,
        "max_model_len": 200,
        "max_observation_chars": 200,
    }
    trajectory = Trajectory("p", 0, 1234)
    episode = run_episode(
        prompt,
        trajectory,
        generate=engine,
        run_tool=run_tool,
        codec=codec or Codec(),
        limits=Limits(**(settings | limits)),
    )
    return asyncio.run(episode)


def test_answer_at_once() -> None:
    trajectory = play(Engine([1, 2, STOP]))
    assert trajectory.finish_reason == "answer"
    assert trajectory.final_text == "ab"
    assert trajectory.token_ids == [5, 6, 1, 2, STOP]
    assert trajectory.response_mask == trajectory.loss_mask == [0, 0, 1, 1, 1]


def test_call_then_answer_keeps_every_array_aligned() -> None:
    engine, codec = Engine([1, 10, STOP], [2, STOP]), Codec()
    trajectory = play(engine, codec)
    assert trajectory.token_ids == [5, 6, 1, 10, STOP, 99, 99, 99, 2, STOP]
    assert trajectory.response_mask == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert trajectory.turn == [0, 0, 1, 1, 1, 1, 1, 1, 2, 2]
    assert trajectory.rollout_log_probs == [0, 0, -0.5, -0.5, -0.5, 0, 0, 0, -1.0, -1.0]
    assert trajectory.weight_version == [-1, -1, 7, 7, 7, -1, -1, -1, 8, 8]
    assert trajectory.final_text == "b"
    assert codec.seen == ["1"]
    [call] = trajectory.tool_calls
    assert (call.turn, call.code, call.status, call.output) == (1, "print(1)", "success", "1")
    # The second turn continues exactly the recorded tokens, with a seed of its own.
    assert engine.asked[1][0] == trajectory.token_ids[:8]
    assert [seed for _, _, seed in engine.asked] == [turn_seed(1234, 1), turn_seed(1234, 2)]


def test_budget_is_what_remains() -> None:
    engine = Engine([10, STOP], [10, STOP], [1, STOP])
    play(engine, max_response_tokens=20, max_turn_tokens=12)
    assert [budget for _, budget, _ in engine.asked] == [12, 12, 10]
    engine = Engine([10, STOP], [1, STOP])
    play(engine, max_model_len=15)
    assert [budget for _, budget, _ in engine.asked] == [13, 8]


@pytest.mark.parametrize("limit", [{"max_response_tokens": 2}, {"max_turn_tokens": 2}, {"max_model_len": 4}])
def test_turn_without_stop_ends_with_length(limit: dict[str, int]) -> None:
    trajectory = play(Engine([1, 2, 1, STOP]), **limit)
    assert trajectory.finish_reason == "length"
    assert trajectory.final_text == "ab"
    assert trajectory.response_tokens == 2


def test_cut_tool_call_is_never_scored_nor_run() -> None:
    trajectory = play(Engine([1, 10, 12, 12]), max_turn_tokens=3)
    assert (trajectory.finish_reason, trajectory.final_text, trajectory.tool_calls) == ("length", "", [])


def test_call_in_the_last_turn_is_not_run() -> None:
    trajectory = play(Engine([10, STOP], [10, STOP]), max_turns=2)
    assert (trajectory.finish_reason, trajectory.final_text) == ("max_turns", "")
    assert len(trajectory.tool_calls) == 1
    assert trajectory.token_ids[-1] == STOP


def test_parse_error_is_shown_and_counted() -> None:
    codec = Codec()
    trajectory = play(Engine([11, STOP], [1, STOP]), codec)
    assert [call.status for call in trajectory.tool_calls] == ["parse_error"]
    assert "invalid JSON" in codec.seen[0]
    assert trajectory.finish_reason == "answer"


@pytest.mark.parametrize(("length", "reason"), [(7, "answer"), (8, "length"), (500, "length")])
def test_observation_needs_room_for_itself_and_one_token(length: int, reason: str) -> None:
    trajectory = play(Engine([10, STOP], [STOP]), Codec(length), max_response_tokens=10)
    assert trajectory.finish_reason == reason
    if reason == "length":
        assert trajectory.token_ids == [5, 6, 10, STOP]
        assert trajectory.tool_calls[0].output == ""
        assert trajectory.final_text == ""


@pytest.mark.parametrize("status", ["timeout", "runtime_error"])
def test_failing_program_is_the_models_business(status: str) -> None:
    async def failing(code: str) -> Any:
        return SimpleNamespace(status=status, stdout="", stderr="boom", wall_s=0.0)

    codec = Codec()
    trajectory = play(Engine([10, STOP], [1, STOP]), codec, failing)
    assert trajectory.tool_calls[0].status == status
    assert status in codec.seen[0]


def test_unavailable_tool_fails_the_episode() -> None:
    async def unavailable(code: str) -> Any:
        raise ToolUnavailable("connection refused")

    with pytest.raises(EpisodeFailed, match="connection refused") as caught:
        play(Engine([10, STOP]), Codec(), unavailable)
    trajectory = caught.value.trajectory
    assert [call.status for call in trajectory.tool_calls] == ["infrastructure_error"]
    assert trajectory.finish_reason is None


def test_unknown_status_is_an_infrastructure_error() -> None:
    async def odd(code: str) -> Any:
        return SimpleNamespace(status="fine", stdout="", stderr="", wall_s=0.0)

    with pytest.raises(EpisodeFailed, match="'fine'"):
        play(Engine([10, STOP]), Codec(), odd)


def test_prompt_must_leave_room() -> None:
    with pytest.raises(PromptTooLong, match="200 tokens"):
        play(Engine(), prompt=[1] * 200)
    assert play(Engine([1, STOP]), prompt=[1] * 199).finish_reason == "length"


def test_an_engine_that_returns_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="returned 0 tokens"):
        play(Engine([]))
