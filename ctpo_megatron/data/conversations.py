"""Turns whole conversations into trajectories for supervised training on the assistant's messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.base.text import printable
from ctpo_megatron.data.data_files import data_stem
from ctpo_megatron.data.marks import Offered, calls_problem, encode, render, rfind_token, unmarked
from ctpo_megatron.data.messages import ChatMessage, check_messages, check_tools
from ctpo_megatron.data.rows import Cell, RowRules, RowSet
from ctpo_megatron.data.tokens import records
from ctpo_megatron.data.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BUCKET_BATCHES = 16

Segment = tuple[str, bool]
"""A piece of the rendered text, and whether it is the assistant's."""


@dataclass(frozen=True)
class ConversationRules(RowRules):
    """How rows become conversations to train on.

    end_tokens: texts of the tokens that end a turn, as engines know them; empty: the tokenizer's end token.
    """

    end_tokens: Sequence[str] = ()


@dataclass
class ConversationSet(RowSet):
    """The conversations of some files as trajectories."""

    called = "conversations"

    conversations: list[Trajectory] = field(default_factory=list)

    def name(self, index: int) -> str:
        """`<file stem>/<row>`."""
        file, row = self.places[index]
        return printable(f"{data_stem(file)}/{row}")

    def tokens(self, index: int) -> Sequence[int]:
        """Return the token ids of a conversation."""
        ids: list[int] = self.conversations[index].tokens["token_ids"].tolist()
        return ids

    def keep(self, indices: Sequence[int]) -> None:
        super().keep(indices)
        self.conversations = [self.conversations[index] for index in indices]


def read_conversations(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, rules: ConversationRules
) -> ConversationSet:
    """Read files (column `messages`, and `tools` if any) and tokenize every conversation as a rollout would produce it.

    The text is split where the assistant starts and after its end-of-turn token, and each piece is encoded separately.
    Assistant pieces have response_mask = loss_mask = 1, log-probability 0.0 and weight version 0; the rest is context.
    What is wrong is in the result, also a template that does not render the start of a conversation as the start of its
    text, or ignores `tool_calls`. With problems there may be no conversations.
    """
    found, tools = ConversationSet(), list[Offered]()
    for place, cells in found.read(files, ("messages",), ("tools",), rules):
        messages, own = cells["messages"], cells.get("tools")
        reason = check_messages(messages)
        if reason is None and messages[-1]["role"] != "assistant":
            reason = "must end with an assistant message: remove what comes after the last one, or the row"
        said: tuple[ChatMessage, ...] = ()
        if reason is None:
            said, reason = rules.messages_of(messages)
        if reason:
            found.problems.row(*place, "messages", messages, reason)
        elif own and (reason := check_tools(own)):
            found.problems.row(*place, "tools", own, reason)
        else:
            found.add(place, cells, said)
            tools.append(rules.tools_of(cells))
    _tokenize(found, tools, tokenizer, rules)
    return found


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
    """Return the inputs that determine the order of `batches`, to compare with a checkpoint.

    conversations: blake2b-128, in hexadecimal, of all tokens and loss masks.
    """
    digest = blake2b(digest_size=16)
    for conversation in conversations:
        digest.update(np.int32(len(conversation)).tobytes())
        digest.update(conversation.tokens["token_ids"].tobytes())
        digest.update(conversation.tokens["loss_mask"].tobytes())
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


def _tokenize(
    found: ConversationSet, tools: Sequence[Offered], tokenizer: PreTrainedTokenizerBase, rules: ConversationRules
) -> None:
    found.conversations = [Trajectory(found.name(index), 0, 0) for index in range(len(found.places))]
    cut = _segments(found, tools, tokenizer, rules)
    # Each text once: questions, tool outputs and the template's own texts repeat often.
    texts = list(dict.fromkeys(text for segments in cut for text, _ in segments))
    token_ids = dict(zip(texts, encode(texts, tokenizer), strict=True))
    for conversation, segments in zip(found.conversations, cut, strict=True):
        conversation.tokens = _records([token_ids[text] for text, _ in segments])


def _segments(
    found: ConversationSet, tools: Sequence[Offered], tokenizer: PreTrainedTokenizerBase, rules: ConversationRules
) -> list[list[Segment]]:
    """Each conversation's text, split where the assistant starts and after it ends its turn."""
    turns = [
        (index, at)
        for index, messages in enumerate(found.messages)
        for at, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    offers, options = [tools[index] for index, _ in turns], rules.template_options
    asked = [found.messages[index][:at] for index, at in turns]
    after = [found.messages[index][: at + 1] for index, at in turns]
    before, refused_before = render(asked, offers, tokenizer, {"add_generation_prompt": True, **options})
    whole, refused_after = render(after, offers, tokenizer, {"add_generation_prompt": False, **options})
    ends = tuple(rules.end_tokens) or (str(tokenizer.eos_token),)
    cut: list[list[Segment]] = [[] for _ in found.messages]
    refused: dict[int, Cell] = {}
    done = [0] * len(cut)
    for place, (index, at) in enumerate(turns):
        if index in refused:
            continue
        prefix, text, message = before[place], whole[place], found.messages[index][at]
        reason = refused_before.get(place) or refused_after.get(place)
        if reason is None and not (prefix.startswith(found.texts[index]) and text.startswith(prefix)):
            reason = _NOT_A_PREFIX.format(at=at)
        if reason is None:
            reason = calls_problem([message], text[len(prefix) :], f" of message {at}") or None
        end = _end_of_turn(text, len(prefix), ends)
        if reason is None and end is None:
            reason = f"the chat template does not end message {at} with {' or '.join(ends)}"
        if reason is not None or end is None:
            refused[index] = ("messages", list(found.messages[index]), reason or "")
            continue
        cut[index] += [(prefix[done[index] :], False), (text[len(prefix) : end], True)]
        done[index], found.texts[index] = end, text
    found.texts = [*map(unmarked, found.texts)]
    found.exclude(refused)
    return cut


def _end_of_turn(text: str, start: int, ends: Sequence[str]) -> int | None:
    """Where a turn that begins at `start` is over: behind the first of the end tokens that the template writes."""
    found = [(at, end) for end in ends if (at := rfind_token(text, end, start)) >= 0]
    return min(at for at, _ in found) + len(min(found)[1]) if found else None


_NOT_A_PREFIX = (
    "the chat template renders the conversation up to message {at} differently from the start of the whole, so "
    "supervised tokens would not be those the model sees when it speaks. Templates that rewrite earlier turns (dropped "
    "thinking, for instance) do this: set model.chat_template to one that keeps the history as it was said, such as "
    "qwen3 (`ctpo doctor CONFIG --template` shows the difference)"
)


def _records(pieces: Sequence[Sequence[int]]) -> NDArray[np.void]:
    """Token ids of context and of what the assistant says, in turn."""
    ids, lengths = [token for piece in pieces for token in piece], [len(piece) for piece in pieces]
    numbers = np.arange(len(pieces))
    mask, turn = np.repeat(numbers % 2, lengths), np.repeat((numbers + 1) // 2, lengths)
    return records(len(ids), token_ids=ids, turn=turn, weight_version=mask - 1, response_mask=mask, loss_mask=mask)
