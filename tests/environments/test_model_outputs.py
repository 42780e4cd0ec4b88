"""What the two protocols make of a turn: a corpus of model outputs, and episodes in which an engine writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctpo_megatron.data.records import Prompt, ToolCall
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.environments import (
    Episode,
    EpisodeLimits,
    FencedParser,
    HermesParser,
    Message,
    ModelTurn,
    PythonTool,
    Toolbox,
    ToolEnvironment,
    ToolParser,
    ToolResult,
    play,
    turn_seed,
)
from tests.extend.scripted import Codec

CORPUS = yaml.load((Path(__file__).parent / "model_outputs.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
NAMED = {"argvalues": CORPUS, "ids": [case["name"] for case in CORPUS]}
PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "fenced": FencedParser}
STOP = 0


class Interpreter:
    """Prints the program that it was to run."""

    schema = PythonTool.schema

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(f"ran {arguments['code']}")


class Writer:
    """An engine that writes one turn after the other and stops behind stop strings, as vLLM does."""

    def __init__(self, toolbox: Toolbox, *turns: str) -> None:
        self.toolbox, self.turns, self.written = toolbox, [[*map(ord, turn), STOP] for turn in turns], 0
        self.asked: list[tuple[int, int]] = []

    async def __call__(
        self, token_ids: Sequence[int], *, max_tokens: int, seed: int, start: int = 0, stop: Sequence[str] = ()
    ) -> ModelTurn:
        self.asked.append((max_tokens, seed))
        text = "".join(map(chr, self.turns[0][self.written : self.written + max_tokens]))
        ends = [text.find(string) + len(string) for string in self.toolbox.stop if string in text]
        ids = list(map(ord, text[: min(ends, default=len(text))]))
        self.written += len(ids)
        return ModelTurn(ids, [-0.5] * len(ids), [1] * len(ids))

    def next_turn(self) -> None:
        self.turns, self.written = self.turns[1:], 0


def played(parser: ToolParser, *turns: str, prompt: str = "?", **limits: Any) -> tuple[Trajectory, Writer]:
    """The episode in which an engine writes `turns`; what it would have written behind a stop is never sampled."""
    toolbox = Toolbox([Interpreter()], parser, 1000)
    engine = Writer(toolbox, *turns)

    class TurnByTurn(ToolEnvironment):
        async def run(self, episode: Episode) -> None:
            reply = episode.reply

            def answer(*messages: Message) -> None:
                reply(*messages)
                engine.next_turn()

            episode.reply = answer  # type: ignore[method-assign]
            await super().run(episode)

    settings = {"max_turns": 4, "max_turn_tokens": None, "max_response_tokens": 3000, "max_model_len": 4000}
    episode = Episode(
        Prompt("p", "source", (), "", tuple(map(ord, prompt))),
        Trajectory("p", 0, 7),
        engine=engine,
        codec=Codec(),
        tools=toolbox,
        limits=EpisodeLimits(**(settings | limits)),
    )
    return asyncio.run(play(TurnByTurn(), episode)), engine


@pytest.mark.parametrize("protocol", PARSERS)
@pytest.mark.parametrize("case", **NAMED)
def test_verdict(case: dict[str, Any], protocol: str) -> None:
    toolbox, verdict = Toolbox([Interpreter()], PARSERS[protocol](), 1000), case[protocol]
    assert toolbox.mentions_call(case["text"]) == ("answer" not in verdict)
    if "answer" in verdict:
        return
    [call], failure = asyncio.run(toolbox.call(case["text"], 1))
    assert failure == ""
    if "call" in verdict:
        assert (call.status, call.arguments) == ("success", {"code": verdict["call"]})
    else:
        assert call.status == "parse_error"
        assert verdict["error"] in call.output


@pytest.mark.parametrize("case", **NAMED)
def test_a_fenced_turn_ends_where_its_first_program_closes(case: dict[str, Any]) -> None:
    verdict = case["fenced"]
    trajectory, _ = played(FencedParser(), case["text"], "done")
    sampled = text_of(trajectory, 1, sampled=1)
    stop = verdict.get("stops")
    expected = case["text"].partition(stop)[0] + stop if stop else case["text"] + chr(STOP)
    assert sampled == expected
    assert [call.status for call in trajectory.tool_calls] == (
        [] if "answer" in verdict else ["success" if "call" in verdict else "parse_error"]
    )


def text_of(trajectory: Trajectory, turn: int, sampled: int) -> str:
    """What the model wrote in a turn (sampled: 1), or was told after it (0)."""
    columns = zip(trajectory.token_ids, trajectory.turn, trajectory.response_mask, strict=True)
    return "".join(chr(token) for token, of_turn, mask in columns if (of_turn, mask) == (turn, sampled))


@pytest.mark.parametrize("parser", PARSERS.values())
def test_thinking_that_the_prompt_has_opened_is_not_read_for_calls(parser: type[HermesParser | FencedParser]) -> None:
    thought = f"Try\n{parser.example}\n</think>\nIt is 3."
    for prompt, calls in (("Q\n<think>\n", 0), ("Q\n", 1)):
        trajectory, _ = played(parser(), thought, "done", prompt=prompt)
        assert len(trajectory.tool_calls) == calls


def test_a_program_is_answered_behind_an_end_token_that_was_not_sampled() -> None:
    trajectory, engine = played(FencedParser(), "Sum:\n```python\nprint(3)\n```\n```output\n4", "It is 3.")
    assert text_of(trajectory, 1, sampled=1) == "Sum:\n```python\nprint(3)\n```\n"
    assert text_of(trajectory, 1, sampled=0) == f"{chr(STOP)}[user: The program printed:\nran print(3)]"
    assert text_of(trajectory, 2, sampled=1) == f"It is 3.{chr(STOP)}"
    assert trajectory.loss_mask == trajectory.response_mask
    assert trajectory.finish_reason == "answer"
    assert [seed for _, seed in engine.asked] == [turn_seed(7, 1), turn_seed(7, 2)]


def test_a_turn_that_ends_itself_is_answered_without_a_second_end_token() -> None:
    trajectory, _ = played(FencedParser(), "```python\nprint(3)\n```", "3")
    assert text_of(trajectory, 1, sampled=1).endswith(f"```{chr(STOP)}")
    assert text_of(trajectory, 1, sampled=0) == "[user: The program printed:\nran print(3)]"


def test_a_block_of_text_does_not_end_the_turn() -> None:
    text = "```text\nnotes\n```\nand\n```python\nprint(1)\n```\n"
    trajectory, engine = played(FencedParser(), text, "done", max_turn_tokens=len(text))
    pause = text.index("and")
    assert text_of(trajectory, 1, sampled=1) == text
    assert engine.asked[:2] == [(len(text), turn_seed(7, 1)), (len(text) - pause, turn_seed(7, 1, pause))]
    assert len({seed for _, seed in engine.asked}) == 3


def test_a_program_that_closes_at_the_token_limit_is_run() -> None:
    text = "```python\nprint(1)\n```"
    assert len(played(FencedParser(), text + "\n", "done", max_turn_tokens=len(text))[0].tool_calls) == 1
    cut, _ = played(FencedParser(), text, max_turn_tokens=len(text) - 1)
    assert (cut.finish_reason, cut.final_text, cut.tool_calls) == ("length", "", [])


def test_a_program_in_the_last_turn_is_no_answer() -> None:
    trajectory, _ = played(FencedParser(), "\\boxed{1}\n```python\nprint(1)\n```\n", max_turns=1)
    assert (trajectory.finish_reason, trajectory.final_text, trajectory.tool_calls) == ("max_turns", "", [])


@pytest.mark.parametrize(
    ("status", "output", "shown"),
    [
        ("success", "2", "The program printed:\n2"),
        ("success", "", "The program printed nothing."),
        ("timeout", "[timeout]", "The program failed.\n[timeout]"),
        ("parse_error", "[parse_error] why", "No program was run.\n[parse_error] why"),
    ],
)
def test_a_program_is_answered_by_the_user(status: Any, output: str, shown: str) -> None:
    call = ToolCall(1, "code_interpreter", {}, status, output, 0.0)
    assert FencedParser().render([call]) == [Message("user", shown)]


def test_the_prompt_of_the_protocol_shows_a_program_that_it_runs() -> None:
    prompt = FencedParser.system_prompt
    assert Toolbox([Interpreter()], FencedParser(), 100).ends_turn(prompt)
    assert FencedParser().parse(prompt)[0].arguments == {"code": "print(6 * 7)"}
    assert "\\boxed{}" in prompt
