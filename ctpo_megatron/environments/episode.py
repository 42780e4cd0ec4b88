"""One episode as an environment sees it: model turns, messages, tool calls, budgets, the token record and its seeds.

Seeds are a stable function of prompt, step and sample, so that a run can be repeated token for token.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, get_args

from ctpo_megatron.base.extensions import called
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.environments.protocol import Environment, Message, ToolCallRequest, ToolUnavailable, left_open
from ctpo_megatron.environments.toolbox import Toolbox, well_formed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ctpo_megatron.data.records import ToolCall
    from ctpo_megatron.data.trajectory import FinishReason, Trajectory
    from ctpo_megatron.environments.template import MessageTemplate

_TAG_TOKENS = 16
"""Last tokens of a prompt that are decoded: more than any tokenizer needs for `<think>` and the newlines after it."""


_BITS = 53  # exact as a JSON number in every reader


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """What an engine sampled for one turn; the stop token, when there is one, is the last token.

    rollout_log_probs: nats, under the distribution sampled from (temperature, top-p and top-k applied).
    weight_version: one integer per token. more: further columns of tokens, `[n, ...]` each; they stay with the
    trajectory up to the micro-batch. computed: further columns of what the model read, from token `start` of the call
    on, up to the last sampled token but one.
    """

    token_ids: Sequence[int]
    rollout_log_probs: Sequence[float]
    weight_version: Sequence[int]
    more: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    computed: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class GenerateTurn(Protocol):
    """An engine as the episode sees it: exact token ids in, sampled tokens out.

    start: how many of the tokens have their `computed` columns from an earlier call. stop: further texts behind which
    sampling ends, given only where there are any: of `rollout.stop`, and what an agent asks for.
    """

    def __call__(
        self, token_ids: Sequence[int], *, max_tokens: int, seed: int, start: int, stop: Sequence[str] = ()
    ) -> Awaitable[ModelTurn]: ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling distribution. temperature 0: greedy; top_k 0: no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What bounds an episode, in tokens unless named otherwise. max_tool_s: seconds; None: no limit.

    max_prompt_tokens: with `max_response_tokens` what one sequence may have; None: `max_model_len` alone bounds it.
    sampling: the distribution that the engine samples from, whatever an agent asks for. stop: texts that end a turn.
    """

    max_turns: int
    max_turn_tokens: int | None
    max_response_tokens: int
    max_model_len: int
    max_tool_calls: int | None = None
    max_tool_s: float | None = None
    max_prompt_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: Sequence[str] = ()

    def end(self, prompt: int) -> int:
        """Return how many tokens a sequence may have whose prompt has `prompt` of them."""
        whole = min(prompt, self.max_prompt_tokens or prompt) + self.max_response_tokens
        return min(whole, self.max_model_len)


@dataclass(frozen=True, slots=True)
class Turn:
    """A model turn. text: without the end token, and with the `<think>` that the prompt ended with, if any.

    number: from 1. complete: False when a token limit cut it.
    has_end_token: False for one that was cut, or that the tool parser ended.
    """

    text: str
    number: int
    complete: bool
    has_end_token: bool


class EpisodeOver(Exception):
    """A budget is exhausted. An environment must not catch it; the episode ends with `reason` and no final text."""

    def __init__(self, reason: FinishReason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class LiveSequence:
    """record: its tokens. end: how many it may have. busy: a call is extending it. turn: of its last model turn."""

    record: Trajectory
    end: int
    busy: bool = False
    turn: int = 0
    computed: int = 0

    def add(self, sampled: ModelTurn, number: int, max_tokens: int) -> None:
        """Record what an engine sampled for turn `number`. Raises RuntimeError for other tokens than were asked for."""
        record, start = self.record, self.computed
        who = f"prompt {record.prompt_id!r} sample {record.sample_index}: the engine returned"
        if not 1 <= len(sampled.token_ids) <= max_tokens:
            raise RuntimeError(f"{who} {len(sampled.token_ids)} tokens, asked for 1 to {max_tokens}")
        record.append_model(sampled.token_ids, sampled.rollout_log_probs, sampled.weight_version, number, sampled.more)
        self.computed = len(record) - 1  # the model has not read the last token
        for name, values in sampled.computed.items():
            if len(values) != self.computed - start:
                read = self.computed - start
                raise RuntimeError(f"{who} {name} of {len(values)} tokens, and read {read} since the last call")
        record.fill(start, sampled.computed)


class Episode:
    """Turns alternate: `generate`, `reply`, `generate`, ... until `finish`. Every token is recorded here, once.

    A `Conversation` calls `sample_turn` instead, for any of several sequences. trajectory: the empty record; its seed
    determines the sampling. Raises ValueError when no token can be sampled.
    """

    def __init__(
        self,
        prompt: Prompt,
        trajectory: Trajectory,
        *,
        engine: GenerateTurn,
        codec: MessageTemplate,
        tools: Toolbox,
        limits: EpisodeLimits,
    ) -> None:
        self.prompt, self.codec, self.tools, self.limits = prompt, codec, tools, limits
        self._trajectory, self._engine = trajectory, engine
        self._turn: Turn | None = None
        self._turns = self._last_number = self._running_calls = 0
        self._sampling: set[asyncio.Future[None]] = set()
        self._awaits_reply = False
        length = len(prompt.token_ids)
        trajectory.append_context(prompt.token_ids, 0)
        if length >= limits.max_model_len:
            raise ValueError(f"prompt {prompt.id!r} has {length} tokens; max_model_len is {limits.max_model_len}")
        self.sequences = [LiveSequence(trajectory, limits.end(length))]

    @property
    def seed(self) -> int:
        """A seed unique to this episode, for environments with randomness."""
        return self._trajectory.seed

    async def generate(self) -> Turn:
        """Sample the next model turn. Raises what the engine raises."""
        self._check_open()
        if self._awaits_reply:
            raise RuntimeError("environment: reply() comes between two calls of generate()")
        self._awaits_reply = True
        return await self.sample_turn(self.sequences[0])

    def open_sequence(self, token_ids: Sequence[int]) -> LiveSequence:
        """Return one more sequence, which begins with these tokens. Raises EpisodeOver when there is no room for
        another.
        """
        from ctpo_megatron.data.trajectory import Trajectory

        record = Trajectory(self._trajectory.prompt_id, self._trajectory.sample_index, self.seed)
        record.append_context(token_ids, 0)
        sequence = LiveSequence(record, self.limits.end(len(token_ids)))
        if len(record) >= sequence.end:
            raise EpisodeOver("length")
        self.sequences.append(sequence)
        return sequence

    async def turn_decided(self) -> None:
        """Wait while every turn of `max_turns` is taken, and one that is being sampled may still be taken back."""
        while self._turns == self.limits.max_turns and self._sampling:
            await asyncio.wait([*self._sampling], return_when=asyncio.FIRST_COMPLETED)

    async def sample_turn(
        self,
        sequence: LiveSequence,
        context: Sequence[int] = (),
        limit: int | None = None,
        stop: Sequence[str] = (),
        deliver: Callable[[Turn], Awaitable[None]] | None = None,
    ) -> Turn:
        """Sample the next model turn at the end of a sequence, after further tokens that the policy did not sample.

        limit: tokens of this turn at most. stop: texts that end it. deliver: gives the turn to its reader. Raises
        EpisodeOver when no turn is left or nothing would fit, and what engine and `deliver` raise; then nothing of the
        turn is recorded, and it does not count.
        """
        self._check_open()
        if self._turns == self.limits.max_turns:
            raise EpisodeOver("max_turns")
        if len(sequence.record) + len(context) >= sequence.end:
            raise EpisodeOver("length")
        before = sequence.record.tokens, sequence.computed
        self._turns += 1
        self._last_number += 1
        ended = asyncio.get_running_loop().create_future()
        self._sampling.add(ended)
        sequence.busy = True
        try:
            if context:
                sequence.record.append_context(context, sequence.turn)
            turn = await self._sample(sequence, self._last_number, limit, stop)
            if deliver is not None:
                await deliver(turn)
        except BaseException:
            sequence.record.tokens, sequence.computed = before
            self._turns -= 1
            raise
        finally:
            sequence.busy = False
            self._sampling.discard(ended)
            ended.set_result(None)
        sequence.turn = turn.number
        if self._turn is None or self._turn.number < turn.number:  # calls may overtake one another
            self._turn = turn
        return turn

    async def _sample(self, sequence: LiveSequence, number: int, limit: int | None, stop: Sequence[str]) -> Turn:
        record, stop = sequence.record, (*self.limits.stop, *stop)
        budgets = (sequence.end - len(record), self.limits.max_turn_tokens, limit)
        max_tokens = min(budget for budget in budgets if budget is not None)
        opened = left_open(self.codec.decode(record.token_ids[-_TAG_TOKENS:]))
        ids: list[int] = []
        # More than one round only with a parser that has `stop`: sampling pauses there, and continues with a seed of
        # its own where the turn is not over.
        while True:
            asked: dict[str, Any] = {"max_tokens": max_tokens - len(ids), "start": sequence.computed}
            asked |= {"stop": stop} if stop else {}
            seed = turn_seed(record.seed, number, len(ids))
            sampled = await self._engine(record.token_ids.copy(), seed=seed, **asked)
            sequence.add(sampled, number, asked["max_tokens"])
            ids += sampled.token_ids
            ended = ids[-1] in self.codec.stop_ids
            said = self.codec.decode(ids[:-1] if ended else ids)
            cuts = [at for at in map(said.find, stop) if at >= 0]
            text = opened + said[: min(cuts, default=len(said))]
            complete = ended or bool(cuts) or self.tools.ends_turn(text)
            if complete or len(ids) == max_tokens or not self.tools.stop:
                return Turn(text, number, complete, ended)

    def mentions_call(self, turn: Turn) -> bool:
        """Return whether the model called a tool in `turn`, or tried to."""
        return self.tools.mentions_call(turn.text)

    async def call_tools(self, turn: Turn) -> list[Message]:
        """Run the tool calls in `turn`, record them, and return the messages to `reply` with.

        The calls of one turn run together, even if they exceed a budget. Raises EpisodeOver when no turn is left to
        read the answers or a budget is exhausted, ToolUnavailable when a tool is.
        """
        self._check_answerable()
        with self._tool_use(1):  # at least, so that no other call begins beyond the budget
            calls, failure = await self.tools.call(turn.text, turn.number)
            self.record(calls)
        if failure:
            raise ToolUnavailable(failure)
        return self.tools.render(calls)

    async def run_tools(self, requests: Sequence[ToolCallRequest], number: int) -> tuple[list[ToolCall], str]:
        """Run calls of turn `number` and record them; also why one could not run ("" if all did).

        Raises EpisodeOver when a budget of tools is exhausted.
        """
        self._check_open()
        with self._tool_use(len(requests)):
            calls, failure = await self.tools.run(requests, number)
            self.record(calls)
        return calls, failure

    def record(self, calls: Sequence[ToolCall]) -> None:
        """Add calls that were run, or could not be read, to the trajectory. Raises RuntimeError after its end."""
        self._check_open()
        self._trajectory.tool_calls += calls

    def reply(self, *messages: Message) -> None:
        """Append messages to the conversation, as the chat template writes them, and open the next model turn.

        Raises EpisodeOver when the last turn was cut, no turn is left, or no further token would fit.
        """
        turn = self._check_answerable()
        ids = self.codec.encode(messages, end_turn=not turn.has_end_token)
        if len(self._trajectory) + len(ids) >= self.sequences[0].end:
            for call in self._trajectory.tool_calls:
                if call.turn == turn.number:
                    call.output = ""  # the model never saw it
            raise EpisodeOver("length")
        self._trajectory.append_context(ids, turn.number)
        self._awaits_reply = False

    def finish(self, final_text: str, reason: FinishReason = "answer") -> None:
        """End the episode. final_text: what the reward function sees.

        Raises TypeError, ValueError, and RuntimeError while a turn is being sampled.
        """
        self._check_open()
        if self._sampling:
            raise RuntimeError("environment: finish() while a turn is being sampled; await the turn, or cancel it")
        if not isinstance(final_text, str):
            raise TypeError(f"environment: finish() takes a text, not a {type(final_text).__name__}")
        from ctpo_megatron.data.trajectory import FinishReason

        if reason not in get_args(FinishReason):
            raise ValueError(f"environment: the reason of finish() is one of {', '.join(get_args(FinishReason))}")
        self._trajectory.finish_reason, self._trajectory.final_text = reason, well_formed(final_text)

    def result(self) -> Trajectory:
        """Return the trajectory of a finished episode. Sequences that the model added nothing to are left out."""
        from ctpo_megatron.data.tokens import joined

        trajectory = self._trajectory
        if trajectory.finish_reason is None or self._turn is None:
            raise RuntimeError("environment: run() returned without a model turn or without finish()")
        parts = [sequence.record.tokens for sequence in self.sequences if sequence.turn]
        trajectory.sequence_starts = [*itertools.accumulate(map(len, parts[:-1]))]
        trajectory.tokens = parts[0] if len(parts) == 1 else joined(parts)
        if self._turns < self._last_number:
            trajectory.number_turns()
        return trajectory

    def _check_open(self) -> None:
        if self._trajectory.finish_reason is not None:
            raise RuntimeError("environment: the episode is finished; nothing is run or recorded after its end")

    def _check_answerable(self) -> Turn:
        """The model turn that can be replied to."""
        self._check_open()
        if self._turn is None or not self._awaits_reply:
            raise RuntimeError("environment: there is no model turn to reply to; call generate() first")
        if not self._turn.complete:
            raise EpisodeOver("length")
        if self._turns == self.limits.max_turns:
            raise EpisodeOver("max_turns")
        return self._turn

    @contextmanager
    def _tool_use(self, starting: int) -> Iterator[None]:
        """Calls count from their start. Raises EpisodeOver when a budget of tools is exhausted."""
        # What could not be parsed was not run, and the model may correct it.
        run = [call for call in self._trajectory.tool_calls if call.status != "parse_error"]
        calls, seconds = self.limits.max_tool_calls, self.limits.max_tool_s
        spent = sum(call.wall_s if call.exec_s is None else call.exec_s for call in run)
        begun = len(run) + self._running_calls
        if (calls is not None and begun >= calls) or (seconds is not None and spent >= seconds):
            raise EpisodeOver("tool_budget")
        self._running_calls += starting
        try:
            yield
        finally:
            self._running_calls -= starting


async def play(environment: Environment, episode: Episode) -> Trajectory:
    """Run `episode` in `environment`; returns its trajectory.

    Raises ToolUnavailable, naming prompt and sample, and whatever else engine and environment raise.
    """
    try:
        with called("the environment"):
            await environment.run(episode)
    except EpisodeOver as over:
        episode.finish("", over.reason)
    except ToolUnavailable as error:
        trajectory = episode._trajectory
        raise ToolUnavailable(f"prompt {trajectory.prompt_id!r} sample {trajectory.sample_index}: {error}") from error
    return episode.result()


def trajectory_seed(run_seed: int, step: int, prompt_id: str, sample_index: int, occurrence: int = 0) -> int:
    """Seed of one trajectory: the top 53 bits of blake2b-64 over the fields joined by the unit separator (0x1f).

    occurrence: how often the step has drawn the prompt before; 0 is no field, so a prompt that is drawn once has the
    same seed as ever. A retried group gets the same seeds, so a fault does not change what is sampled.
    """
    return _hash("trajectory", run_seed, step, prompt_id, sample_index, *([occurrence] if occurrence else []))


def turn_seed(seed: int, turn: int, tokens: int = 0) -> int:
    """Seed of model turn `turn` (from 1) of the trajectory with `seed`, after the first `tokens` tokens of the turn."""
    return _hash("turn", seed, turn, *([tokens] if tokens else []))


def _hash(*parts: object) -> int:
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big") >> (64 - _BITS)
