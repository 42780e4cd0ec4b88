"""An agent's calls of the model, each with its whole history, as sequences of exact token ids."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ctpo_megatron.data import ChatMessage, ToolCall, plain_tools
from ctpo_megatron.environments.episode import Episode, EpisodeOver, LiveSequence, Turn
from ctpo_megatron.environments.protocol import Message, ParseError, Schema, ToolCallRequest, ToolUnavailable
from ctpo_megatron.environments.tokenizer import TokenizerError


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said: text besides its calls, the calls by id, and the numbers of tokens read and sampled.

    unread: the record of calls that cannot be read, if there are any.
    """

    turn: Turn
    text: str
    calls: dict[str, ToolCallRequest]
    unread: list[ToolCall]
    read: int
    sampled: int

    @property
    def message(self) -> ChatMessage:
        """As a history that repeats it has it, without ids."""
        made: ChatMessage = {"role": "assistant", "content": self.text}
        if self.calls:
            made["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls.values()
            ]
        return made


@dataclass(frozen=True, slots=True)
class _Said:
    """Where an answer ends in the token record: after `length` tokens of a sequence. messages: with it, of its call."""

    sequence: LiveSequence
    length: int
    has_end_token: bool
    messages: int


class Conversation:
    """The calls of one episode. A call extends the sequence whose token ids its own begin with, or begins another.

    A history that repeats earlier answers verbatim is continued with the ids that were sampled. Its further messages
    become tokens as in `Episode.reply`. Any other history is rendered as prompts of data files are.

    offered: schemas that the run's prompts show, in place of the run's own tools (`data.tool_in_prompt`). over: why no
    call is answered any more.
    """

    def __init__(self, episode: Episode, offered: Sequence[Schema]) -> None:
        self.episode, self._offered = episode, offered
        self._own = plain_tools(json.dumps([*episode.tools.schemas]))
        self.over: EpisodeOver | None = None
        self.last: Answer | None = None
        self._said: dict[bytes, _Said] = {}
        self._pending: dict[str, tuple[int, ToolCallRequest]] = {}
        self._numbers = itertools.count(1)

    async def answer(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Schema] = (),
        *,
        limit: int | None = None,
        stop: Sequence[str] = (),
        deliver: Callable[[Answer], Awaitable[None]],
    ) -> None:
        """Have the model answer these messages (`plain_messages`).

        tools: that it may call; without any no call is read. limit: tokens. stop: texts that end the turn. deliver:
        gives the answer to the agent. Raises EpisodeOver when a budget is exhausted, TokenizerError for messages that
        cannot be rendered, and what engine and `deliver` raise; then there was no call.
        """
        await self.episode.turn_decided()
        if self.over is not None:
            raise self.over
        self._note_results(messages)
        shown = self._offered if [*tools] == self._own else tools
        try:
            sequence, context = self._placed(messages, shown)

            async def give(turn: Turn) -> None:
                answer = self._answer(turn, sequence, reads_calls=bool(tools))
                await deliver(answer)
                self._keep(answer, sequence, [*messages, answer.message], shown)

            await self.episode.sample_turn(sequence, context, limit, stop, give)
        except EpisodeOver as over:
            self.over = over
            raise

    def _answer(self, turn: Turn, sequence: LiveSequence, *, reads_calls: bool) -> Answer:
        """What a turn says; calls that cannot be read stay text, and are recorded as the run's own would be."""
        text, requests, unread = turn.text, list[ToolCallRequest](), list[ToolCall]()
        if reads_calls:
            try:
                text, requests = self.episode.tools.read(turn.text)
            except ParseError as error:
                unread = [self.episode.tools.unread(error, turn.number)]
        calls = {f"call_{next(self._numbers)}": request for request in requests}
        length, sampled = len(sequence.record), sequence.record.turn.copy().count(turn.number)
        return Answer(turn, text, calls, unread, length - sampled, sampled)

    def _keep(
        self, answer: Answer, sequence: LiveSequence, messages: Sequence[ChatMessage], shown: Sequence[Schema]
    ) -> None:
        """Note an answer that the agent has. messages: with it."""
        turn = answer.turn
        *_, digest = _digests(messages, shown)
        self._said[digest] = _Said(sequence, len(sequence.record), turn.has_end_token, len(messages))
        self._pending |= {id: (turn.number, request) for id, request in answer.calls.items()}
        self.episode.record(answer.unread)
        if self.last is None or self.last.turn.number < turn.number:
            self.last = answer

    async def call_tool(self, id: str, name: str, arguments: Any) -> str:
        """Run a call with the tools of the run, and return what the model is to be shown.

        Raises EpisodeOver when a budget of tools is exhausted, ToolUnavailable when a tool is.
        """
        number, _ = self._pending.pop(id, (self.last.turn.number if self.last else 0, None))
        if not number:
            raise RuntimeError("the agent called a tool before the model said anything")
        try:
            calls, failure = await self.episode.run_tools([ToolCallRequest(name, arguments)], number)
        except EpisodeOver as over:
            self.over = over
            raise
        if failure:
            raise ToolUnavailable(failure)
        return "\n".join(message.content for message in self.episode.tools.render(calls))

    def _placed(self, messages: Sequence[ChatMessage], tools: Sequence[Schema]) -> tuple[LiveSequence, list[int]]:
        """The sequence of a call, and the tokens to add to it before the model speaks."""
        ids = self._token_ids(messages, tools)
        free = [each for each in self.episode.sequences if not each.busy and _begins(ids, each)]
        if not free:
            return self.episode.open_sequence(ids), []
        longest = max(free, key=lambda each: len(each.record))
        return longest, ids[len(longest.record) :]

    def _token_ids(self, messages: Sequence[ChatMessage], tools: Sequence[Schema]) -> list[int]:
        """Of the history up to the model's next turn."""
        repeated = [self._said[digest] for digest in _digests(messages, tools) if digest in self._said]
        if repeated:
            said = repeated[-1]
            rest = messages[said.messages :]
            if rest and not any(message["role"] == "assistant" for message in rest):
                new = [Message(m["role"], m["content"], self._name_of(m, messages)) for m in rest]
                try:
                    return said.sequence.record.token_ids[: said.length] + self.episode.codec.encode(
                        new, end_turn=not said.has_end_token
                    )
                except TokenizerError:  # of these roles in this place; the whole may be rendered all the same
                    pass
        return self.episode.codec.conversation(messages, tools)

    def _name_of(self, message: ChatMessage, messages: Sequence[ChatMessage]) -> str:
        """The name of the tool that answers; clients give the id of its call."""
        if message["role"] != "tool" or message.get("name"):
            return str(message.get("name", ""))
        calls = [call for each in messages for call in each.get("tool_calls", ())]
        return next((c["function"]["name"] for c in calls if c.get("id") == message.get("tool_call_id")), "")

    def _note_results(self, messages: Sequence[ChatMessage]) -> None:
        """Record the calls that the agent itself has answered."""
        for message in messages:
            if message["role"] == "tool" and (found := self._pending.pop(message.get("tool_call_id", ""), None)):
                number, request = found
                call = ToolCall(number, request.name, request.arguments, "success", message["content"], 0.0)
                self.episode.record([call])


def _begins(ids: Sequence[int], sequence: LiveSequence) -> bool:
    """Whether the sequence is the beginning of these ids, and something follows what the model said in it."""
    length = len(sequence.record)
    return length + bool(sequence.turn) <= len(ids) and sequence.record.token_ids == ids[:length]


def _digests(messages: Sequence[ChatMessage], tools: Sequence[Schema]) -> Iterator[bytes]:
    """One after each message, of all messages up to there, by which histories are compared.

    Clients choose their own ids, and may name a tool or not.
    """
    so_far = hashlib.blake2b(json.dumps([*tools], sort_keys=True).encode())
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        plain = [message["role"], message["content"], calls]
        so_far.update(json.dumps(plain, sort_keys=True).encode())
        yield so_far.digest()
