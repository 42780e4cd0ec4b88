"""One episode as an environment sees it: model turns, messages, tool calls, budgets, and the token record."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, get_args

from ctpo_megatron.base.extensions import called
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.environments.parsers.thinking import left_open
from ctpo_megatron.environments.protocol import Environment, Message, ToolUnavailable
from ctpo_megatron.environments.seeds import turn_seed
from ctpo_megatron.environments.toolbox import Toolbox, well_formed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ctpo_megatron.data.trajectory import FinishReason, Trajectory
    from ctpo_megatron.environments.template import TokenizerCodec

_TAG_TOKENS = 16
"""Last tokens of a prompt that are decoded: more than any tokenizer needs for `<think>` and the newlines after it."""


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

    start: how many of the tokens have their `computed` columns from an earlier call.
    """

    def __call__(self, token_ids: Sequence[int], *, max_tokens: int, seed: int, start: int) -> Awaitable[ModelTurn]: ...


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Budgets of an episode, in tokens unless named otherwise. max_tool_s: seconds; None: no limit."""

    max_turns: int
    max_turn_tokens: int | None
    max_response_tokens: int
    max_model_len: int
    max_tool_calls: int | None = None
    max_tool_s: float | None = None


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


class Episode:
    """Turns alternate: `generate`, `reply`, `generate`, ... until `finish`. Every token is recorded here, once.

    trajectory: the empty record; its seed determines the sampling. Raises ValueError when no token can be sampled.
    """

    def __init__(
        self,
        prompt: Prompt,
        trajectory: Trajectory,
        *,
        engine: GenerateTurn,
        codec: TokenizerCodec,
        tools: Toolbox,
        limits: EpisodeLimits,
    ) -> None:
        self.prompt = prompt
        self._trajectory, self._engine, self._codec = trajectory, engine, codec
        self._tools, self._limits = tools, limits
        self._turn: Turn | None = None
        self._awaits_reply = False
        self._computed = 0
        length = len(prompt.token_ids)
        trajectory.append_context(prompt.token_ids, 0)
        if length >= limits.max_model_len:
            raise ValueError(f"prompt {prompt.id!r} has {length} tokens; max_model_len is {limits.max_model_len}")
        self._end = min(length + limits.max_response_tokens, limits.max_model_len)

    @property
    def seed(self) -> int:
        """A seed unique to this episode, for environments with randomness."""
        return self._trajectory.seed

    async def generate(self) -> Turn:
        """Sample the next model turn. Raises what the engine raises."""
        self._check_open()
        if self._awaits_reply:
            raise RuntimeError("environment: reply() comes between two calls of generate()")
        trajectory, number = self._trajectory, self._turn.number + 1 if self._turn else 1
        budget = self._end - len(trajectory)
        per_turn = self._limits.max_turn_tokens
        max_tokens = budget if per_turn is None else min(budget, per_turn)
        self._awaits_reply = True
        opened = left_open(self._codec.decode(trajectory.token_ids[-_TAG_TOKENS:]))
        ids: list[int] = []
        # More than one round only with a parser that has `stop`: sampling pauses there, and continues with a seed of
        # its own where the turn is not over.
        while True:
            ids += await self._sample(number, max_tokens - len(ids), turn_seed(trajectory.seed, number, len(ids)))
            ended = ids[-1] in self._codec.stop_ids
            text = opened + self._codec.decode(ids[:-1] if ended else ids)
            complete = ended or self._tools.ends_turn(text)
            if complete or len(ids) == max_tokens or not self._tools.stop:
                self._turn = Turn(text, number, complete, ended)
                return self._turn

    async def _sample(self, number: int, max_tokens: int, seed: int) -> Sequence[int]:
        """Have the engine continue turn `number`; record and return the tokens."""
        trajectory, start = self._trajectory, self._computed
        sampled = await self._engine(trajectory.token_ids.copy(), max_tokens=max_tokens, seed=seed, start=start)
        ids = sampled.token_ids
        if not 1 <= len(ids) <= max_tokens:
            raise RuntimeError(
                f"prompt {trajectory.prompt_id!r} sample {trajectory.sample_index}: the engine returned {len(ids)} "
                f"tokens, asked for 1 to {max_tokens}"
            )
        trajectory.append_model(ids, sampled.rollout_log_probs, sampled.weight_version, number, sampled.more)
        self._computed = len(trajectory) - 1  # the model has not read the last token
        for name, values in sampled.computed.items():
            if len(values) != self._computed - start:
                raise RuntimeError(
                    f"prompt {trajectory.prompt_id!r} sample {trajectory.sample_index}: the engine returned {name} of "
                    f"{len(values)} tokens, and read {self._computed - start} since the last call"
                )
        trajectory.fill(start, sampled.computed)
        return ids

    def mentions_call(self, turn: Turn) -> bool:
        """Whether the model called a tool in `turn`, or tried to."""
        return self._tools.mentions_call(turn.text)

    async def call_tools(self, turn: Turn) -> list[Message]:
        """Run the tool calls in `turn`, record them, and return the messages to `reply` with.

        The calls of one turn run together, even if they exceed a budget. Raises EpisodeOver when no turn is left to
        read the answers or a budget is exhausted, ToolUnavailable when a tool is.
        """
        self._check_answerable()
        self._check_tool_budget()
        calls, failure = await self._tools.call(turn.text, turn.number)
        self._trajectory.tool_calls += calls
        if failure:
            raise ToolUnavailable(failure)
        return self._tools.render(calls)

    def reply(self, *messages: Message) -> None:
        """Append messages to the conversation, as the chat template writes them, and open the next model turn.

        Raises EpisodeOver when the last turn was cut, no turn is left, or no further token would fit.
        """
        turn = self._check_answerable()
        ids = self._codec.encode(messages, end_turn=not turn.has_end_token)
        if len(self._trajectory) + len(ids) >= self._end:
            for call in self._trajectory.tool_calls:
                if call.turn == turn.number:
                    call.output = ""  # the model never saw it
            raise EpisodeOver("length")
        self._trajectory.append_context(ids, turn.number)
        self._awaits_reply = False

    def finish(self, final_text: str, reason: FinishReason = "answer") -> None:
        """End the episode. final_text: what the reward function sees. Raises TypeError, ValueError."""
        self._check_open()
        if not isinstance(final_text, str):
            raise TypeError(f"environment: finish() takes a text, not a {type(final_text).__name__}")
        from ctpo_megatron.data.trajectory import FinishReason

        if reason not in get_args(FinishReason):
            raise ValueError(f"environment: the reason of finish() is one of {', '.join(get_args(FinishReason))}")
        self._trajectory.finish_reason, self._trajectory.final_text = reason, well_formed(final_text)

    def result(self) -> Trajectory:
        """The trajectory of a finished episode."""
        if self._trajectory.finish_reason is None or self._turn is None:
            raise RuntimeError("environment: run() returned without a model turn or without finish()")
        return self._trajectory

    def _check_open(self) -> None:
        if self._trajectory.finish_reason is not None:
            raise RuntimeError("environment: the episode is finished")

    def _check_answerable(self) -> Turn:
        """The model turn that can be replied to."""
        self._check_open()
        if self._turn is None or not self._awaits_reply:
            raise RuntimeError("environment: there is no model turn to reply to; call generate() first")
        if not self._turn.complete:
            raise EpisodeOver("length")
        if self._turn.number == self._limits.max_turns:
            raise EpisodeOver("max_turns")
        return self._turn

    def _check_tool_budget(self) -> None:
        # What could not be parsed was not run, and the model may correct it.
        run = [call for call in self._trajectory.tool_calls if call.status != "parse_error"]
        calls, seconds = self._limits.max_tool_calls, self._limits.max_tool_s
        spent = sum(call.wall_s if call.exec_s is None else call.exec_s for call in run)
        if (calls is not None and len(run) >= calls) or (seconds is not None and spent >= seconds):
            raise EpisodeOver("tool_budget")


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
