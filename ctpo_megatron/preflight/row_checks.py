"""What admission asks of every row: ids, lengths, and whether the text shows the model what it is judged by."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.config import Config, PolicyConfig, RewardConfig, RolloutConfig, sequence_multiple
from ctpo_megatron.data import Cell, ConversationSet, Prompt, PromptSet, RowSet, special_tokens
from ctpo_megatron.environments import ParseError, example_call, make_parser
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.preflight.own_words import tool_output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BOX = re.compile(r"\\f?box|boxed", re.IGNORECASE)
_AT_ONCE = 1000


def check_rows(
    found: RowSet, column: str, roles: Sequence[str], tokenizer: PreTrainedTokenizerBase, spec: ModelSpec | None
) -> None:
    """What is asked of prompts and conversations alike. roles: whose messages the text must show."""
    check_ids(found, column, spec)
    check_shown(found, column, roles)
    check_round_trip(found, column, tokenizer)
    check_control_tokens(found, column, tokenizer)
    check_media(found, column)


def check_ids(found: RowSet, column: str, spec: ModelSpec | None) -> None:
    """Every id is one of the model's."""
    if spec is None or not spec.vocab_size:
        return
    cells: dict[int, Cell] = {}
    for index in range(len(found.places)):
        if (largest := max(found.tokens(index), default=0)) >= spec.vocab_size:
            reason = (
                f"holds the token id {largest}, and the model has {spec.vocab_size} (vocab_size): tokenizer and model "
                "do not belong together, or a token was added without a larger embedding"
            )
            cells[index] = (column, found.texts[index][:80], reason)
    found.exclude(cells)


def check_round_trip(found: RowSet, column: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Decoded tokens are the text again, but for the tokenizer's own normal form and the number of blanks."""
    rendered = [*_rendered(found)]
    special, cells = special_tokens(tokenizer), dict[int, Cell]()
    for start in range(0, len(rendered), _AT_ONCE):
        some = rendered[start : start + _AT_ONCE]
        ids = [list(found.tokens(index)) for index in some]
        for index, back in zip(some, tokenizer.batch_decode(ids), strict=True):
            text = found.texts[index]
            whole = text if column == "prompt" else text[: len(back)]  # a template may write on after the last turn
            if back != whole and (lost := _first_lost(whole, back, tokenizer, special)):
                cells[index] = (column, text[:80], f"the tokenizer does not give the text back: {lost}")
    found.doubt(cells)


def _first_lost(text: str, back: str, tokenizer: PreTrainedTokenizerBase, special: re.Pattern[str] | None) -> str:
    """The first words that differ, or ""."""
    normal = tokenizer.backend_tokenizer.normalizer
    said = [normal.normalize_str(each) if normal is not None else each for each in (text, back)]
    ours, theirs = ((special.sub(" ", each) if special else each).replace("\u2581", " ").split() for each in said)
    differing = next((pair for pair in zip_longest(ours, theirs, fillvalue="") if pair[0] != pair[1]), None)
    return f"{differing[0][:40]!r} comes back as {differing[1][:40]!r}" if differing else ""


def check_call(tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> str:
    """Why the parser could not read its own example after the tokenizer, or ""."""
    if not rollout.tools:
        return ""
    parser = make_parser(rollout)
    said, call = example_call(parser)
    back = str(tokenizer.decode(tokenizer(said, add_special_tokens=False)["input_ids"]))
    if back == said or not hasattr(parser, "example"):
        return ""
    try:
        read = parser.parse(back)
    except ParseError as error:
        read, why = [], str(error)
    else:
        why = "other arguments"
    if [(each.name, each.arguments) for each in read] == [(call.name, call.arguments)]:
        return ""
    return (
        f"the tokenizer turns a tool call into {back!r}, which rollout.tool_parser: {rollout.tool_parser.name} does "
        f"not read ({why}); repair tokenizer.json, or take it from the model's publisher"
    )


@dataclass(frozen=True)
class Room:
    """Tokens that a training sequence may have. key: what ends it; limit; fix: what to do."""

    key: str
    limit: int
    fix: str


def rooms(policy: PolicyConfig, spec: ModelSpec | None) -> Iterator[Room]:
    """What limits a sequence of the trainer, after padding: the micro-batch, and the model's positions."""
    fix = "shorten or remove such rows"
    multiple = sequence_multiple(policy)
    tokens = policy.chosen.micro_batch_tokens * policy.context_parallel_size // multiple * multiple
    yield Room("policy.micro_batch_tokens", tokens, f"raise it, or {fix}")
    if spec is not None:
        yield Room("the model's max_position_embeddings", spec.max_position_embeddings, fix)


def check_lengths(found: ConversationSet, config: Config, spec: ModelSpec | None) -> None:
    """Conversations fit into a micro-batch and the model's positions; `data.overlong` decides as for prompts."""
    for room in sorted(rooms(config.policy, spec), key=lambda each: each.limit):
        cells: dict[int, Cell] = {}
        for index in range(len(found.places)):
            if (length := len(found.tokens(index))) > room.limit:
                reason = f"{length} tokens, and {room.key} holds {room.limit}: {room.fix}"
                cells[index] = ("messages", found.texts[index][:80], reason)
        found.exclude(cells, "data.overlong", config.data.overlong)
        if cells and config.data.overlong == "refuse":
            return


def check_count(found: ConversationSet, config: Config) -> None:
    """There are enough conversations for a batch."""
    if config.sft is None or found.problems.lines:
        return
    size, count = config.sft.conversations_per_step, sum(found.rows.values()) - len(found.left_out)
    if count < size:
        found.problems.general(
            f"sft.conversations_per_step = {size}: {count} conversations cannot fill a batch; lower it to at most "
            f"{count}, or give more data"
        )


def check_control_tokens(found: RowSet, column: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """No field of a message holds the text of a control token: it stays text, which may not be what was meant."""
    if (special := special_tokens(tokenizer)) is None:
        return
    cells: dict[int, Cell] = {}
    for index in _rendered(found):
        for at, message in enumerate(found.said(index)):
            if hit := special.search(json.dumps(message, ensure_ascii=False)):
                reason = (
                    f"message {at} holds {hit[0]}, which is read as plain text, not as the control token; remove or "
                    "rewrite it, or use the field that the chat template writes it for (such as tool_calls)"
                )
                cells[index] = (column, message["content"], reason)
                break
    found.doubt(cells)


def check_shown(found: RowSet, column: str, roles: Sequence[str]) -> None:
    """The rendered text holds the text of every message of these roles, blanks and JSON's escapes aside."""
    cells: dict[int, Cell] = {}
    for index in _rendered(found):
        text = _without_blanks(found.texts[index])
        for at, message in enumerate(found.said(index)):
            if message["role"] in roles and (lost := _lost(message, text)):
                reason = (
                    f"the chat template does not show {lost} of message {at} ({message['role']}): set "
                    "model.chat_template to one that does, or move the text to where it is shown"
                )
                cells[index] = (column, message["content"], reason)
                break
    found.exclude(cells)


def _lost(message: Mapping[str, Any], text: str) -> str:
    for key in ("content", "reasoning_content"):
        said = message.get(key) or ""
        plain, escaped = (_without_blanks(each) for each in (said, json.dumps(said, ensure_ascii=False)[1:-1]))
        if plain not in text and escaped not in text and _without_blanks(json.dumps(said)[1:-1]) not in text:
            return f"the {key}"
    return ""


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _rendered(found: RowSet) -> Iterable[int]:
    """Rows that the chat template did not refuse."""
    return (index for index, text in enumerate(found.texts) if text)


def check_own_words(found: ConversationSet) -> None:
    """No assistant message holds the output of a tool, which would be trained on as the model's words."""
    cells: dict[int, Cell] = {}
    for index in _rendered(found):
        for at, message in enumerate(found.said(index)):
            if message["role"] == "assistant" and (notation := _tool_output(message)):
                reason = (
                    f"message {at} (assistant) holds a tool's output ({notation}), which would be trained on as "
                    "the model's words; end the message before it, and put the output into a message of the role `tool`"
                )
                cells[index] = ("messages", message["content"], reason)
                break
    found.exclude(cells)


def _tool_output(message: Mapping[str, Any]) -> str:
    return tool_output(message["content"]) or tool_output(message.get("reasoning_content") or "")


def check_answer_form(found: PromptSet, reward: RewardConfig) -> None:
    """The rendered prompt names a box where math_verify reads one."""
    cells: dict[int, Cell] = {}
    for index in _rendered(found):
        scorer = reward.by_source.get(found.prompts[index].data_source, reward.function)
        if scorer.name == "math_verify" and not _BOX.search(found.texts[index]):
            reason = (
                "the rendered prompt never names a box, and math_verify reads the answer in \\boxed{} alone: say so in "
                "data.system_prompt or the prompt, or set a reward.function that reads what the prompt asks for"
            )
            cells[index] = ("prompt", found.prompts[index].messages[-1]["content"], reason)
    found.doubt(cells)


def check_held_out(found: PromptSet, training: PromptSet) -> None:
    """No held-out prompt is trained on, with its ground truth; of files that are read as both, nothing is said."""
    both = {file.resolve() for file in training.rows}
    files = {(prompt.token_ids, prompt.answer): file for prompt, (file, _) in _placed(training)}
    twins: dict[tuple[Path, Path], list[int]] = {}
    for prompt, (file, row) in _placed(found):
        other = files.get((prompt.token_ids, prompt.answer))
        if other is not None and file.resolve() not in both:
            twins.setdefault((file, other), []).append(row)
    counts = Counter(file for file, _ in found.places)
    for (file, other), rows in twins.items():
        found.doubts.general(
            f"{file}: {len(rows):,} of {counts[file]:,} prompts are in {other} too, with their ground truth; the first "
            f"is row {rows[0]}: the accuracy there says nothing about other problems; leave them out of data.train"
        )


def _placed(found: PromptSet) -> Iterator[tuple[Prompt, tuple[Path, int]]]:
    return zip(found.prompts, found.places, strict=True)


def check_call_form(found: PromptSet, rollout: RolloutConfig) -> None:
    """The rendered prompt shows the form of calls that the parser reads."""
    parser, cells = make_parser(rollout), dict[int, Cell]()
    if not rollout.tools or rollout.max_turns < 2 or not hasattr(parser, "example"):
        return
    for index in _rendered(found):
        if not parser.mentions_call(found.texts[index]):
            name = rollout.tool_parser.name
            reason = (
                f"the rendered prompt does not show how to call a tool as rollout.tool_parser: {name} reads it, so "
                "calls of another form are final answers: set rollout.tool_parser: fenced, which a system prompt "
                "explains, or a model.chat_template that shows it"
            )
            cells[index] = ("prompt", found.prompts[index].messages[-1]["content"], reason)
    found.doubt(cells)


def check_media(found: RowSet, column: str) -> None:
    """No row needs an image, a video or a sound, which are not read."""
    cells: dict[int, Cell] = {}
    for index in _rendered(found):
        for message in found.said(index):
            if hit := _MEDIA.search(message["content"]):
                cells[index] = (column, message["content"], f"names {hit[0]}: {_BLIND}")
                break
    found.doubt(cells)
    for file, names in found.ignored.items():
        found.doubts.general(f"{file} has the columns {', '.join(names)}: {_BLIND}")


_MEDIA = re.compile(r"<\|?(?:image|video|audio)(?:_pad|_1)?\|?>")
_BLIND = "images, videos and sounds are not read, and the model is trained without them; leave such rows out"


def check_libraries(found: RowSet, column: str, lacking: Sequence[str]) -> None:
    """No system prompt names a library that the sandbox lacks. lacking: `ctpo_sandbox.libraries.absent`."""
    if not lacking:
        return
    names, cells = re.compile(rf"\b({'|'.join(lacking)})\b"), dict[int, Cell]()
    for index in _rendered(found):
        for message in found.said(index):
            if message["role"] == "system" and (hit := names.search(message["content"])):
                reason = (
                    f"the system prompt names {hit[0]}, which the sandbox's environment lacks: pip install {hit[0]}"
                )
                cells[index] = (column, message["content"], reason)
                break
    found.doubt(cells)
