"""Selects trajectories for the report and prepares them for its template: tokens, tool calls, the ratio plot."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.run_paths import EVALUATION, TRAJECTORIES
from ctpo_megatron.tracking import TRACES, Head, Record, read_heads, records_at, trajectory_files

log = logging.getLogger(__name__)

GROUPS_PER_STEP = 8
EVALUATION_EXAMPLES = 8
TOKEN_BUDGET = 8_000
"""Tokens shown individually on the whole page; the rest is plain text, so that the page stays small."""
TEXT_LIMIT = 6_000
"""Characters of one piece of text; the middle of a longer one is omitted."""

_OF_TOKENS = {"token_ids", "response_mask", "loss_mask", "rollout_log_probs", "weight_version", "turn", *TRACES}
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_CHAT_MARKS = re.compile(r"<\|im_(?:start|end)\|>(?:system|user|assistant)?\n?")


@dataclass
class Token:
    """A token as shown: `level` 0 (surprising) to 4 (certain); `outside` when its ratio left the clip window."""

    text: str
    hover: str
    level: int
    outside: bool


@dataclass
class Block:
    """A piece of an episode: prompt, model text (as runs of tokens, inside or outside of a tool call), or tool."""

    kind: str
    turn: int
    text: str = ""
    runs: list[tuple[bool, list[Token]]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class View:
    """One trajectory, ready for the template.

    record: its fields that are not of tokens. tokens: their number, prompt included. coloured: whether any of its
    tokens are shown individually.
    """

    source: str
    step: int
    record: Record
    question: str
    blocks: list[Block]
    tool: str
    ratio: dict[str, Any] | None
    tokens: int
    model_tokens: int

    @property
    def coloured(self) -> bool:
        return any(token.level >= 0 for block in self.blocks for _, run in block.runs for token in run)


def sample_views(run_dir: Path) -> list[View]:
    """Trajectories worth reading: best and worst of groups of the first and last step, and evaluation examples.

    Of a dump, these alone are read. Each dump has the same share of the tokens that are shown individually.
    """
    dumps = []
    for source, folder in (("training", TRAJECTORIES), ("evaluation", EVALUATION)):
        files = trajectory_files(run_dir, folder)
        dumps += [(source, step, files[step]) for step in sorted({min(files), max(files)} if files else ())]
    views = []
    for source, step, path in dumps:
        budget = Budget(TOKEN_BUDGET // len(dumps))
        try:
            heads = read_heads(path)
            chosen = _best_and_worst(heads) if source == "training" else _examples(heads)
            records = records_at(path, [head.place for head in chosen])
        except DamagedFileError as error:
            log.warning("%s: the report goes without it", error)
            continue
        views += [_view(source, step, record, budget) for record in records]
    return views


@dataclass
class Budget:
    """Number of tokens that may still be shown individually."""

    left: int

    def take(self, count: int) -> int:
        """How many of `count` more tokens fit; they are subtracted."""
        granted = min(count, self.left)
        self.left -= granted
        return granted


def _reward(head: Head) -> float:
    return -math.inf if head.reward is None else head.reward


def _best_and_worst(heads: list[Head]) -> list[Head]:
    """Best and worst trajectory of some groups; groups whose rewards differ come first, and among them groups with
    recorded ratios."""
    groups: dict[str, list[Head]] = {}
    for head in heads:
        groups.setdefault(head.prompt_id, []).append(head)
    judged = [[head for head in group if head.reward is not None] or group for group in groups.values()]
    pairs = [(max(group, key=_reward), min(group, key=_reward)) for group in judged]
    pairs.sort(key=lambda pair: (_reward(pair[0]) == _reward(pair[1]), not pair[0].traced))
    chosen = []
    for best, worst in pairs[:GROUPS_PER_STEP]:
        chosen += [best] if _reward(best) == _reward(worst) else [best, worst]
    return chosen


def _examples(heads: list[Head]) -> list[Head]:
    """Half wrong, half right where both exist."""
    ranked = sorted(heads, key=_reward)
    half = EVALUATION_EXAMPLES // 2
    return ranked if len(ranked) <= EVALUATION_EXAMPLES else ranked[:half] + ranked[-half:]


def _view(source: str, step: int, record: Record, budget: Budget) -> View:
    blocks, start = [], 0
    calls = record["tool_calls"]
    for segment, length in zip(record["segments"], _segment_lengths(record), strict=True):
        if segment["kind"] == "model":
            blocks.append(Block("model", segment["turn"], runs=_runs(segment, record, start, budget)))
        elif segment["kind"] == "observation":
            answered = [call for call in calls if call["turn"] == segment["turn"]]
            if answered or _plain(segment["text"]):
                blocks.append(Block("tool", segment["turn"], _shorten(segment["text"].strip()), calls=answered))
        else:
            blocks.append(Block("prompt", 0, _shorten(_plain(segment["text"]))))
        start += length
    prompts = [block.text for block in blocks if block.kind == "prompt"]
    question = next((line for line in reversed("\n".join(prompts).splitlines()) if line.strip()), record["prompt_id"])
    rest = {name: value for name, value in record.items() if name not in _OF_TOKENS}
    size, by_model = len(record["token_ids"]), sum(record["response_mask"])
    return View(source, step, rest, question, blocks, _tool_status(calls), ratio_picture(record), size, by_model)


def _segment_lengths(record: dict[str, Any]) -> list[int]:
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


def _shorten(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


def _tool_status(calls: list[dict[str, Any]]) -> str:
    if not calls:
        return "none"
    return "success" if any(call["status"] == "success" for call in calls) else "failed"


def _runs(segment: dict[str, Any], record: Record, start: int, budget: Budget) -> list[tuple[bool, list[Token]]]:
    """Model text as tokens as far as the budget goes, grouped into runs inside and outside of a tool call."""
    text, chars = segment["text"], segment.get("token_chars") or []
    chars = chars[: budget.take(len(chars))]
    inside = [match.span() for match in _CALL.finditer(text)]
    runs: list[tuple[bool, list[Token]]] = []
    position = 0
    for index, width in enumerate(chars, start=start):
        in_call = any(first <= position < end for first, end in inside)
        if not runs or runs[-1][0] != in_call:
            runs.append((in_call, []))
        runs[-1][1].append(_token(text[position : position + width], record, index))
        position += width
    if rest := text[position:]:
        runs.append((False, [Token(_shorten(rest), "", -1, False)]))
    return runs


def _token(text: str, record: dict[str, Any], index: int) -> Token:
    probability = math.exp(min(0.0, record["rollout_log_probs"][index]))
    hover, outside = f"probability {probability:.3f}", False
    log_ratio = _at(record, "log_ratio", index)
    if log_ratio is not None:
        hover += f" · log ratio {log_ratio:+.3f}"
        low, high = _at(record, "clip_low", index), _at(record, "clip_high", index)
        if low is not None and high is not None:
            hover += f" in [{low:+.3f}, {high:+.3f}]"
            outside = not low <= log_ratio <= high
    level = sum(probability >= bound for bound in (0.1, 0.5, 0.9, 0.99))
    return Token(text, hover, level, outside)


def _at(record: dict[str, Any], name: str, index: int) -> float | None:
    values = record.get(name)
    return values[index] if values and len(values) == len(record["token_ids"]) else None


def ratio_picture(record: dict[str, Any], width: int = 640, height: int = 96) -> dict[str, Any] | None:
    """Points of the cumulative log-ratio and of the clip window over model tokens, in pixels; None without the data.

    `log_ratio`, `clip_low` and `clip_high` are per-token lists of the dump (see `write_trajectories`).
    """
    names = ("log_ratio", "clip_low", "clip_high")
    size = len(record["token_ids"])
    if any(len(record.get(name) or ()) != size for name in names):
        return None
    # Two pixels a point: more could not be seen, and every sample of the report would weigh as much.
    at = _thin([index for index in range(size) if record["response_mask"][index]], record["log_ratio"], width // 2)
    curves = {name: [record[name][index] for index in at] for name in names}
    values = [*curves["log_ratio"], *curves["clip_low"], *curves["clip_high"]]
    if len(at) < 2 or any(value is None or not math.isfinite(value) for value in values):
        return None
    reach = max(abs(value) for value in values) or 1.0

    def place(values: list[float]) -> list[str]:
        return [
            f"{position * width / (len(at) - 1):.1f},{height / 2 - value / reach * (height / 2 - 4):.1f}"
            for position, value in enumerate(values)
        ]

    lows, highs = place(curves["clip_low"]), place(curves["clip_high"])
    return {
        "width": width,
        "height": height,
        "reach": f"{reach:.2f}",
        "tokens": sum(record["response_mask"]),
        "line": " ".join(place(curves["log_ratio"])),
        "window": " ".join([*highs, *reversed(lows)]),
    }


def _thin(indices: list[int], values: list[float], most: int) -> list[int]:
    """At most `most` of the indices: of each interval the one with the largest value, so that peaks are kept."""
    stride = -(-len(indices) // most) or 1
    return [
        max(indices[start : start + stride], key=lambda index: abs(values[index] or 0.0))
        for start in range(0, len(indices), stride)
    ]
