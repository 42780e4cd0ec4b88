"""Turns whole conversations into trajectories for supervised training on the assistant's messages."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Any

from ctpo_megatron.config import SystemPrompt
from ctpo_megatron.data.messages import (
    ChatMessage,
    check_messages,
    check_tools,
    dropped_calls,
    plain_messages,
    plain_tools,
)
from ctpo_megatron.data.problems import DataError, Problems
from ctpo_megatron.data.prompts import Location
from ctpo_megatron.data.tables import find_files, read_rows
from ctpo_megatron.data.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BUCKET_BATCHES = 16

Segment = tuple[str, bool]
"""A piece of the rendered text, and whether it is the assistant's."""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """One row: its file and row number, its messages, and the tools passed to the template."""

    place: Location
    messages: tuple[ChatMessage, ...]
    tools: list[dict[str, Any]] | None


def load_conversations(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tool_schemas: Sequence[Mapping[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: SystemPrompt = SystemPrompt(),  # noqa: B008 - it is immutable
    limit: int | None = None,
) -> list[Trajectory]:
    """Read files (column `messages`, and `tools` if any) and tokenize every conversation as a rollout would produce it.

    The text is split where the assistant starts and after its end-of-turn token, and each piece is encoded separately.
    Assistant pieces have response_mask = loss_mask = 1, log-probability 0.0 and weight version 0; the rest is context.
    tool_schemas: for rows without their own tools. limit: rows to read from each file. Raises DataError listing all bad
    rows. Also for a template that does not render the start of a conversation as the start of its text, or ignores
    `tool_calls`.
    """
    problems = Problems()
    offered = [dict(schema) for schema in tool_schemas] or None
    conversations: list[_Conversation] = []
    for file in find_files(files, problems):
        for row, cells in read_rows(file, ("messages",), ("tools",), problems, limit):
            messages, tools = cells["messages"], cells.get("tools")
            reason = check_messages(messages)
            if reason is None and messages[-1]["role"] != "assistant":
                reason = "must end with an assistant message"
            said: tuple[ChatMessage, ...] = ()
            if reason is None:
                try:
                    said = system_prompt.before(plain_messages(messages))
                except ValueError as error:
                    reason = str(error)
            if reason:
                problems.row(file, row, "messages", messages, reason)
            elif tools and (reason := check_tools(tools)):
                problems.row(file, row, "tools", tools, reason)
            else:
                own = plain_tools(tools) if tools else offered
                conversations.append(_Conversation((file, row), said, own))
    problems.raise_if_any()
    if not conversations:
        raise DataError(f"no conversations in {', '.join(files)}")
    cut = _segments(conversations, tokenizer, chat_template_kwargs or {})
    return _encode(cut, [conversation.place for conversation in conversations], tokenizer)


def batches(conversations: Sequence[Trajectory], per_step: int, seed: int) -> Iterator[list[Trajectory]]:
    """Endless batches of `per_step` conversations of similar length, reproducible from `seed`.

    Every epoch is shuffled again. Within windows of a few batches conversations are sorted by length, so that a batch
    needs little padding; the batches of an epoch come in random order. A few conversations, chosen before sorting, may
    be left over from an epoch: the next one begins with them. So at any time no conversation has been in two batches
    more than another. Raises ValueError when there are fewer conversations than a batch needs.
    """
    if len(conversations) < per_step:
        raise ValueError(
            f"{len(conversations)} conversations cannot fill a batch of {per_step}: lower sft.conversations_per_step"
        )
    return _endless_batches(conversations, per_step, Random(f"{seed}/batches"))


def batch_order(conversations: Sequence[Trajectory], per_step: int, seed: int) -> dict[str, Any]:
    """The inputs that determine the order of `batches`, to compare with a checkpoint.

    conversations: blake2b-128, in hexadecimal, of all tokens and loss masks.
    """
    digest = blake2b(digest_size=16)
    for conversation in conversations:
        digest.update(array("i", [len(conversation), *conversation.token_ids]))
        digest.update(bytes(conversation.loss_mask))
    return {"seed": seed, "conversations_per_step": per_step, "conversations": digest.hexdigest()}


def _endless_batches(conversations: Sequence[Trajectory], per_step: int, rng: Random) -> Iterator[list[Trajectory]]:
    order = list(range(len(conversations)))
    left_over: list[int] = []
    window = per_step * _BUCKET_BATCHES
    while True:
        rng.shuffle(order)
        epoch = order
        if left_over:  # they were used less often than all others, so they may not wait among the batches of this epoch
            waiting = set(left_over)
            filling = [index for index in order if index not in waiting][: per_step - len(left_over)]
            yield [conversations[index] for index in left_over + filling]
            used = set(filling)
            epoch = [index for index in order if index not in used]
        full = len(epoch) - len(epoch) % per_step
        left_over = epoch[full:]
        ranked: list[int] = []
        for start in range(0, full, window):
            ranked += sorted(epoch[start : min(start + window, full)], key=lambda index: len(conversations[index]))
        starts = list(range(0, full, per_step))
        rng.shuffle(starts)
        for start in starts:
            yield [conversations[index] for index in ranked[start : start + per_step]]


def _segments(
    conversations: Sequence[_Conversation], tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]
) -> list[list[Segment]]:
    """Each conversation's text, split where the assistant starts and after it ends its turn."""
    turns = [
        (index, at)
        for index, conversation in enumerate(conversations)
        for at, message in enumerate(conversation.messages)
        if message["role"] == "assistant"
    ]
    asked = _rendered(conversations, turns, tokenizer, {"add_generation_prompt": True, **kwargs})
    after = [(index, at + 1) for index, at in turns]
    said = _rendered(conversations, after, tokenizer, {"add_generation_prompt": False, **kwargs})
    end_of_turn = str(tokenizer.eos_token)
    cut: list[list[Segment]] = [[] for _ in conversations]
    done = [0] * len(conversations)
    text = [""] * len(conversations)
    for (index, at), prefix, whole in zip(turns, asked, said, strict=True):
        place, message = conversations[index].place, conversations[index].messages[at]
        if not (prefix.startswith(text[index]) and whole.startswith(prefix)):
            raise _not_a_prefix(place, at)
        end = whole.rfind(end_of_turn, len(prefix))
        if end < 0:
            raise DataError(f"{_named(place)}: the chat template does not end message {at} with {end_of_turn}")
        if names := dropped_calls([message], whole[len(prefix) :]):
            shown = f"the calls of message {at} in `tool_calls`: {', '.join(names)}"
            raise DataError(f"{_named(place)}: the chat template does not show {shown}")
        end += len(end_of_turn)
        cut[index] += [(prefix[done[index] :], False), (whole[len(prefix) : end], True)]
        done[index], text[index] = end, whole
    return cut


def _rendered(
    conversations: Sequence[_Conversation],
    beginnings: Sequence[tuple[int, int]],
    tokenizer: PreTrainedTokenizerBase,
    kwargs: Mapping[str, Any],
) -> list[str]:
    """The text of the first `count` messages of a conversation, for each (conversation, count)."""
    import jinja2

    together: dict[str, list[int]] = {}
    for place, (index, _) in enumerate(beginnings):
        together.setdefault(json.dumps(conversations[index].tools), []).append(place)
    texts = [""] * len(beginnings)
    # One call for all conversations with the same tools: the template is looked up and compiled once.
    for places in together.values():
        alike = [beginnings[place] for place in places]
        messages = [list(conversations[index].messages[:count]) for index, count in alike]
        tools = conversations[alike[0][0]].tools
        try:
            rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
        except (jinja2.TemplateError, TypeError):
            _name_refused(conversations, beginnings, tokenizer, kwargs)
            raise
        for place, text in zip(places, rendered, strict=True):
            texts[place] = text
    return texts


def _name_refused(
    conversations: Sequence[_Conversation],
    beginnings: Sequence[tuple[int, int]],
    tokenizer: PreTrainedTokenizerBase,
    kwargs: Mapping[str, Any],
) -> None:
    """Raises DataError listing all rows that the template refuses; returns if it accepts each of them separately."""
    import jinja2

    problems = Problems()
    refused: set[int] = set()
    for index, count in beginnings:
        if index in refused:
            continue
        messages, tools = list(conversations[index].messages[:count]), conversations[index].tools
        try:
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
        except (jinja2.TemplateError, TypeError) as error:
            refused.add(index)
            reason = f"the chat template refuses it: {error}"
            problems.row(*conversations[index].place, "messages", messages, reason)
    problems.raise_if_any()


def _not_a_prefix(place: Location, message: int) -> DataError:
    return DataError(
        f"{_named(place)}: the chat template renders the conversation up to message {message} differently from the "
        "start of the whole, so supervised tokens would not be those the model sees when it speaks. Templates that "
        "rewrite earlier turns (dropped thinking, for instance) do this: set model.chat_template to one that keeps "
        "the history as it was said, such as qwen3 (`ctpo doctor CONFIG --template` shows the difference)"
    )


def _named(place: Location) -> str:
    return f"{place[0]} row {place[1]} column 'messages'"


def _encode(
    cut: Sequence[Sequence[Segment]], places: Sequence[Location], tokenizer: PreTrainedTokenizerBase
) -> list[Trajectory]:
    # Cached: questions, tool outputs and the template's own texts repeat often.
    pieces = list(dict.fromkeys(text for segments in cut for text, _ in segments))
    encoded = tokenizer(pieces, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    token_ids = dict(zip(pieces, encoded, strict=True))
    conversations: list[Trajectory] = []
    for (file, row), segments in zip(places, cut, strict=True):
        record = Trajectory(prompt_id=f"{file.stem}/{row}", sample_index=0, seed=0)
        turn = 0
        for text, is_model in segments:
            ids = token_ids[text]
            if is_model:
                turn += 1
                record.append_model(ids, [0.0] * len(ids), [0] * len(ids), turn)
            else:
                record.append_context(ids, turn)
        conversations.append(record)
    return conversations
