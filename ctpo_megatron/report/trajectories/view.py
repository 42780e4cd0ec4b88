"""Prepares trajectories for a template: texts, single tokens, tool calls, the ratio."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ctpo_megatron.report.trajectories.ratio import WINDOW, Point, RatioQuantity, ratio_points
from ctpo_megatron.tracking import TRACES, Head, Record

_OF_TOKENS = {"token_ids", "response_mask", "loss_mask", "rollout_log_probs", "weight_version", "turn", *TRACES}
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_CHAT_MARKS = re.compile(r"<\|im_(?:start|end)\|>(?:system|user|assistant)?\n?")
Source = Literal["training", "evaluation"]
_NAMES: dict[Source, str] = {"training": "step", "evaluation": "evaluation"}


@dataclass
class Token:
    """A token as shown: `level` 0 (surprising) to 4 (certain); `outside` when its ratio left the clip window.

    A level of -1: text that is not shown by token.
    """

    text: str
    hover: str
    level: int
    outside: bool


@dataclass
class Call:
    """A tool call as shown. asked: a program, or the arguments as JSON."""

    name: str
    status: str
    seconds: float
    asked: str
    output: str

    @property
    def good(self) -> bool:
        return self.status == "success"


@dataclass
class Block:
    """A piece of an episode: prompt, model text (as runs of tokens, inside or outside of a tool call), or tool."""

    kind: str
    turn: int
    text: str = ""
    runs: list[tuple[bool, list[Token]]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


@dataclass
class View:
    """One trajectory, ready for the template.

    place: in its dump. record: its fields that are not of tokens. tokens: their number, prompt included.
    """

    source: Source
    step: int
    place: int
    record: Record
    question: str
    blocks: list[Block]
    tool: str
    ratio: list[Point] | None
    tokens: int
    model_tokens: int

    @property
    def address(self) -> str:
        """Its id on the page, such as `step-24-7`."""
        return self.address_of(self.place)

    def address_of(self, place: int) -> str:
        """Return the id of another trajectory of its dump."""
        return f"{_NAMES[self.source]}-{self.step}-{place}"

    @property
    def coloured(self) -> bool:
        """Whether any of its tokens are shown one by one."""
        return any(token.level >= 0 for block in self.blocks for _, run in block.runs for token in run)


@dataclass
class GroupView:
    """Samples of one prompt, side by side.

    views: those that are shown. heads: all of the dump.
    """

    views: list[View]
    heads: list[Head]

    @property
    def first(self) -> View:
        return self.views[0]


@dataclass
class Budget:
    """How much of its trajectories a page shows.

    tokens: that may still be shown one by one, which takes most of the room. characters: of a piece of text; the middle
    of a longer one is left out.
    """

    tokens: int
    characters: int

    def take(self, count: int) -> int:
        """Return how many of `count` more tokens fit; they are subtracted."""
        granted = min(count, self.tokens)
        self.tokens -= granted
        return granted

    def shorten(self, text: str) -> str:
        """Return a text without its middle, if it is too long."""
        if len(text) <= self.characters:
            return text
        half = self.characters // 2
        return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


def view_of(source: Source, step: int, place: int, record: Record, quantity: RatioQuantity, budget: Budget) -> View:
    """Prepare the trajectory at a place of a dump. Raises LookupError, TypeError, ValueError or AttributeError for a
    record that is none of a trajectory."""
    blocks, start = [], 0
    calls = record["tool_calls"]
    for segment, length in zip(record["segments"], _segment_lengths(record), strict=True):
        if segment["kind"] == "model":
            tokens = _Tokens(record, quantity, start)
            blocks.append(Block("model", segment["turn"], runs=_runs(segment, tokens, budget)))
        elif segment["kind"] == "observation":
            answered = [_call(call, budget) for call in calls if call["turn"] == segment["turn"]]
            if answered or _plain(segment["text"]):
                blocks.append(Block("tool", segment["turn"], budget.shorten(segment["text"].strip()), calls=answered))
        else:
            blocks.append(Block("prompt", 0, budget.shorten(_plain(segment["text"]))))
        start += length
    prompts = [block.text for block in blocks if block.kind == "prompt"]
    question = next((line for line in reversed("".join(prompts[:1]).splitlines()) if line.strip()), record["prompt_id"])
    rest = {name: value for name, value in record.items() if name not in _OF_TOKENS}
    size, by_model = len(record["token_ids"]), sum(record["response_mask"])
    tool, ratio = _tool_status(calls), ratio_points(record)
    return View(source, step, place, rest, question, blocks, tool, ratio, size, by_model)


def _call(call: dict[str, Any], budget: Budget) -> Call:
    arguments = call["arguments"]
    only_code = isinstance(arguments, dict) and list(arguments) == ["code"] and isinstance(arguments["code"], str)
    asked = arguments["code"] if only_code else json.dumps(arguments, ensure_ascii=False)
    return Call(call["name"], call["status"], call["wall_s"], budget.shorten(asked), budget.shorten(call["output"]))


def _segment_lengths(record: Record) -> list[int]:
    lengths: list[int] = []
    former = None
    for key in zip(record["turn"], record["response_mask"], strict=True):
        if key != former:
            lengths.append(0)
            former = key
        lengths[-1] += 1
    return lengths


def _plain(text: str) -> str:
    """Text without the markers of a ChatML template."""
    return _CHAT_MARKS.sub("", text).strip()


def _tool_status(calls: Sequence[dict[str, Any]]) -> str:
    if not calls:
        return "none"
    return "success" if any(call["status"] == "success" for call in calls) else "failed"


def _runs(segment: dict[str, Any], tokens: _Tokens, budget: Budget) -> list[tuple[bool, list[Token]]]:
    """Model text as tokens as far as the budget goes, grouped into runs inside and outside of a tool call."""
    text, chars = segment["text"], segment.get("token_chars") or []
    chars = chars[: budget.take(len(chars))]
    inside = [match.span() for match in _CALL.finditer(text)]
    runs: list[tuple[bool, list[Token]]] = []
    position = 0
    for index, width in enumerate(chars):
        in_call = any(first <= position < end for first, end in inside)
        if not runs or runs[-1][0] != in_call:
            runs.append((in_call, []))
        runs[-1][1].append(tokens.shown(index, text[position : position + width]))
        position += width
    if rest := text[position:]:
        runs.append((False, [Token(budget.shorten(rest), "", -1, False)]))
    return runs


@dataclass(frozen=True)
class _Tokens:
    """Tokens of a segment. start: the first one's place in the trajectory."""

    record: Record
    quantity: RatioQuantity
    start: int

    def shown(self, index: int, text: str) -> Token:
        probability = math.exp(min(0.0, self.record["rollout_log_probs"][self.start + index]))
        hover, outside = f"probability {probability:.3f}", False
        log_ratio, low, high = (self._at(name, index) for name in WINDOW)
        if log_ratio is not None:
            hover += f" · {self.quantity.name} {log_ratio:+.3f}"
            if low is not None and high is not None:
                hover += f" in [{low:+.3f}, {high:+.3f}]".replace("-inf", "−∞").replace("+inf", "∞")
                outside = not low <= log_ratio <= high
        level = sum(probability >= bound for bound in (0.1, 0.5, 0.9, 0.99))
        return Token(text, hover, level, outside)

    def _at(self, name: str, index: int) -> float | None:
        values = self.record.get(name)
        return values[self.start + index] if values and len(values) == len(self.record["token_ids"]) else None
