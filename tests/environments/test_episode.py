"""Episodes against a scripted engine: budgets, endings, and the token record that training relies on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.environments import (
    Episode,
    EpisodeLimits,
    EpisodeOver,
    HermesParser,
    Message,
    ModelTurn,
    Toolbox,
    ToolEnvironment,
    ToolResult,
    ToolUnavailable,
    turn_seed,
)
from ctpo_megatron.environments import play as play_episode
from tests.environments.endpoint_stand import Tool as Tool

STOP = 0
CALL = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(1)"}}</tool_call>'
PIECES = {1: "a", 2: "b", 10: CALL, 11: "<tool_call>oops</tool_call>", 12: "<tool_call>"}


class Codec:
    stop_ids = frozenset({STOP})

    def __init__(self, observation_length: int = 3) -> None:
        self.observation_length = observation_length
        self.seen: list[str] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(PIECES.get(t, "?") for t in token_ids)

    def encode(self, messages: Sequence[Message], *, end_turn: bool = False) -> list[int]:
        self.seen += [message.content for message in messages]
        return [*([STOP] if end_turn else []), *[99] * self.observation_length]


class Engine:
    """Plays scripted turns, cut to the budget it is given, and notes what it was asked."""

    def __init__(self, *turns: list[int]) -> None:
        self.turns = list(turns)
        self.asked: list[tuple[list[int], int, int]] = []

    async def __call__(
        self, token_ids: Sequence[int], *, max_tokens: int, seed: int, start: int = 0, stop: Sequence[str] = ()
    ) -> ModelTurn:
        self.asked.append((list(token_ids), max_tokens, seed))
        turn = self.turns.pop(0)[:max_tokens]
        n = len(self.asked)
        return ModelTurn(turn, [-0.5 * n] * len(turn), [n + 6] * len(turn))


def play(
    engine: Engine,
    codec: Codec | None = None,
    tool: Any = None,
    prompt: Sequence[int] = (5, 6),
    environment: Any = None,
    parser: Any = None,
    **limits: Any,
) -> Trajectory:
    settings = {"max_turns": 3, "max_turn_tokens": None, "max_response_tokens": 100, "max_model_len": 200}
    toolbox = Toolbox([tool or Tool()], parser or HermesParser(), max_chars=200)
    episode = Episode(
        Prompt("p", "source", (), "42", tuple(prompt)),
        Trajectory("p", 0, 1234),
        engine=engine,
        codec=codec or Codec(),
        tools=toolbox,
        limits=EpisodeLimits(**(settings | limits)),
    )
    return asyncio.run(play_episode(environment or ToolEnvironment(), episode))


def test_columns_of_what_the_model_read_are_of_the_turn_that_read_it_first() -> None:
    """The engine reports a row for each token that it has read since the last turn: not for the one sampled last."""

    class Reader(Engine):
        last = -1

        async def __call__(
            self, token_ids: Sequence[int], *, max_tokens: int, seed: int, start: int = 0, stop: Sequence[str] = ()
        ) -> ModelTurn:
            made = await super().__call__(token_ids, max_tokens=max_tokens, seed=seed, start=start)
            read = [*token_ids, *made.token_ids][start : self.last]
            rows = np.array([[100 * len(self.asked) + token] for token in read], np.int16)
            return replace(made, computed={"read": rows})

    trajectory = play(Reader([1, 10, STOP], [2, STOP]))
    assert trajectory.token_ids == [5, 6, 1, 10, STOP, 99, 99, 99, 2, STOP]
    expected = [105, 106, 101, 110, 200 + STOP, 299, 299, 299, 202, 0]
    assert trajectory.tokens["read"][:, 0].tolist() == expected
    careless = Reader([1, 10, STOP], [2, STOP])
    careless.last = -2
    with pytest.raises(RuntimeError, match="'p' sample 0: the engine returned read of 3 tokens, and read 4 since"):
        play(careless)


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
    assert (call.turn, call.name, call.arguments) == (1, "code_interpreter", {"code": "print(1)"})
    assert (call.status, call.output) == ("success", "1")
    # The second turn continues exactly the recorded tokens, with a seed of its own.
    assert engine.asked[1][0] == trajectory.token_ids[:8]
    assert [seed for _, _, seed in engine.asked] == [turn_seed(1234, 1), turn_seed(1234, 2)]


def test_a_stop_text_ends_a_turn_and_its_tokens_stay() -> None:
    stops: list[Sequence[str]] = []

    class Asked(Engine):
        async def __call__(self, token_ids: Sequence[int], *, stop: Sequence[str] = (), **asked: Any) -> ModelTurn:
            stops.append(stop)
            return await super().__call__(token_ids, **asked)

    trajectory = play(Asked([10, 2], [1, 2]), stop=("b",))
    assert trajectory.token_ids == [5, 6, 10, 2, STOP, 99, 99, 99, 1, 2]  # the template's end token follows a call
    assert trajectory.response_mask == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert (trajectory.finish_reason, trajectory.final_text) == ("answer", "a")
    assert stops == [("b",)] * 2


def test_budget_is_what_remains() -> None:
    engine = Engine([10, STOP], [10, STOP], [1, STOP])
    play(engine, max_response_tokens=20, max_turn_tokens=12)
    assert [budget for _, budget, _ in engine.asked] == [12, 12, 10]
    engine = Engine([10, STOP], [1, STOP])
    play(engine, max_model_len=15)
    assert [budget for _, budget, _ in engine.asked] == [13, 8]


@pytest.mark.parametrize(
    ("turns", "limits", "reason", "text", "calls", "tokens"),
    [
        *(([[1, 2, 1, STOP]], {f"max_{name}": n}, "length", "ab", 0, 2)
          for name, n in (("response_tokens", 2), ("turn_tokens", 2), ("model_len", 4))),
        ([[1, 10, 12, 12]], {"max_turn_tokens": 3}, "length", "", 0, 3),  # a call that is cut: neither scored nor run
        ([[10, STOP], [10, STOP]], {"max_turns": 2}, "max_turns", "", 1, 2 + 3 + 2),  # the last call is not run
    ],
)  # fmt: skip
def test_a_limit_ends_an_episode(
    turns: list[list[int]], limits: dict[str, int], reason: str, text: str, calls: int, tokens: int
) -> None:
    trajectory = play(Engine(*turns), **limits)
    assert (trajectory.finish_reason, trajectory.final_text) == (reason, text)
    assert (len(trajectory.tool_calls), trajectory.response_tokens) == (calls, tokens)


@pytest.mark.parametrize(
    ("limits", "exec_s", "calls"),
    [
        ({"max_tool_calls": 1}, 0.5, 1),
        ({"max_tool_calls": 2}, 0.5, 2),
        ({"max_tool_s": 1.5}, 1.0, 2),
        ({"max_tool_s": 1.0}, 1.0, 1),
        ({"max_tool_calls": 3, "max_tool_s": 4.0}, 1.0, 3),
    ],
)
def test_a_call_beyond_the_budget_of_a_trajectory_is_not_run(
    limits: dict[str, float], exec_s: float, calls: int
) -> None:
    answer = ToolResult("1", exec_s=exec_s)
    turns = [[11, STOP], *[[10, STOP]] * 4]  # the first cannot be read, and costs nothing
    trajectory = play(Engine(*turns), tool=Tool(answer), max_turns=9, **limits)
    assert (trajectory.finish_reason, trajectory.final_text) == ("tool_budget", "")
    assert [call.status for call in trajectory.tool_calls] == ["parse_error", *["success"] * calls]
    assert trajectory.token_ids[-1] == STOP  # its turn is part of the record, as that of `max_turns`


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
    codec = Codec()
    trajectory = play(Engine([10, STOP], [1, STOP]), codec, Tool(ToolResult("boom", status)))  # type: ignore[arg-type]
    assert trajectory.tool_calls[0].status == status
    assert codec.seen == ["boom"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [(ToolUnavailable("connection refused"), "connection refused"), (ToolResult("", "fine"), "'fine'")],  # type: ignore[arg-type]
)
def test_a_tool_that_is_unavailable_or_answers_nonsense_fails_the_episode(answer: Any, said: str) -> None:
    with pytest.raises(ToolUnavailable, match=said):
        play(Engine([10, STOP]), tool=Tool(answer))


def test_prompt_must_leave_room() -> None:
    with pytest.raises(ValueError, match="200 tokens"):
        play(Engine(), prompt=[1] * 200)
    assert play(Engine([1, STOP]), prompt=[1] * 199).finish_reason == "length"


def test_an_engine_that_returns_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="returned 0 tokens"):
        play(Engine([]))


class Conversation:
    """An environment from a script: text is a user's message, anything else is called with the episode."""

    def __init__(self, *script: Any) -> None:
        self.script = script

    async def run(self, episode: Episode) -> None:
        for line in self.script:
            if isinstance(line, str):
                episode.reply(Message("user", line))
            else:
                await line(episode)


async def generate(episode: Episode) -> None:
    await episode.generate()


async def finish(episode: Episode) -> None:
    episode.finish("done")


def test_user_turns_are_recorded_like_tool_output() -> None:
    engine, codec = Engine([1, STOP], [2, 2, STOP]), Codec()
    trajectory = play(engine, codec, environment=Conversation(generate, "higher", generate, finish))
    assert trajectory.token_ids == [5, 6, 1, STOP, 99, 99, 99, 2, 2, STOP]
    assert trajectory.response_mask == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert trajectory.turn == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert trajectory.weight_version == [-1, -1, 7, 7, -1, -1, -1, 8, 8, 8]
    assert (trajectory.finish_reason, trajectory.final_text) == ("answer", "done")
    assert codec.seen == ["higher"]
    assert engine.asked[1][0] == trajectory.token_ids[:7]


@pytest.mark.parametrize(
    ("turns", "limits", "reason", "tokens"),
    [
        ([[1, STOP], [1, STOP]], {"max_turns": 1}, "max_turns", 2),
        ([[1, 1, 1]], {"max_turn_tokens": 2}, "length", 2),
        ([[1, STOP], [1, STOP]], {"max_response_tokens": 5}, "length", 2),
        ([[1, STOP], [1, STOP]], {"max_response_tokens": 6}, "length", 6),
    ],
)
def test_a_conversation_that_uses_up_a_budget_ends(
    turns: list[list[int]], limits: dict[str, int], reason: str, tokens: int
) -> None:
    trajectory = play(Engine(*turns), environment=Conversation(generate, "more", generate, "more", finish), **limits)
    assert (trajectory.finish_reason, trajectory.final_text) == (reason, "")
    assert trajectory.response_tokens == tokens


@pytest.mark.parametrize(
    ("script", "mistake"),
    [
        ((generate, generate), "reply.. comes between"),
        (("hello",), "no model turn to reply to"),
        ((generate, "a", "b"), "no model turn to reply to"),
        ((generate, finish, "more"), "is finished"),
        ((generate, finish, finish), "is finished"),
        ((generate,), "without finish"),
        ((finish,), "without a model turn"),
    ],
)
def test_an_environment_cannot_break_the_record(script: tuple[Any, ...], mistake: str) -> None:
    with pytest.raises(RuntimeError, match=mistake):
        play(Engine([1, STOP], [1, STOP]), environment=Conversation(*script))


def test_a_swallowed_budget_stays_used_up() -> None:
    async def insist(episode: Episode) -> None:
        with pytest.raises(EpisodeOver):
            episode.reply(Message("user", "more"))
        await episode.generate()

    with pytest.raises(RuntimeError, match="comes between"):
        play(Engine([1, STOP], [1, STOP]), environment=Conversation(generate, insist), max_turns=1)
