"""One multi-turn episode, independent of any engine: model turns, tool calls, budgets, and the token record."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ctpo_megatron.data.records import FinishReason, ToolCall, ToolStatus, Trajectory
from ctpo_megatron.environments.seeds import turn_seed
from ctpo_megatron.environments.tools import (
    ExecutionResultLike,
    ParseError,
    ToolUnavailable,
    mentions_call,
    observation_text,
    parse_call,
    parse_error_text,
)

_STATUSES: tuple[ToolStatus, ...] = ("success", "timeout", "runtime_error")


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """What an engine sampled for one turn; the stop token, when there is one, is the last token.

    rollout_log_probs: nats, under the distribution sampled from (temperature, top-p and top-k applied).
    weight_version: one integer a token.
    """

    token_ids: Sequence[int]
    rollout_log_probs: Sequence[float]
    weight_version: Sequence[int]


class GenerateTurn(Protocol):
    """An engine as the episode sees it: exact token ids in, sampled tokens out."""

    def __call__(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> Awaitable[ModelTurn]: ...


RunTool = Callable[[str], Awaitable[ExecutionResultLike]]
"""Runs Python source; raises ToolUnavailable (never a reward) when that could not be done."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of an episode, in tokens unless named otherwise."""

    max_turns: int
    max_turn_tokens: int | None
    max_response_tokens: int
    max_model_len: int
    max_observation_chars: int


class TextCodec(Protocol):
    """Token ids to text of a model turn, and tool output to the tokens that open the next turn."""

    stop_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def observation_ids(self, text: str) -> list[int]: ...


class PromptTooLong(ValueError):
    """The prompt leaves the model no room to answer."""


class EpisodeFailed(Exception):
    """The episode could not be completed through no fault of the policy; `trajectory` holds what was recorded."""

    def __init__(self, trajectory: Trajectory, cause: str) -> None:
        super().__init__(f"prompt {trajectory.prompt_id!r} sample {trajectory.sample_index}: {cause}")
        self.trajectory = trajectory


async def run_episode(
    prompt_ids: Sequence[int],
    trajectory: Trajectory,
    *,
    generate: GenerateTurn,
    run_tool: RunTool,
    codec: TextCodec,
    limits: Limits,
) -> Trajectory:
    """Play one episode into the empty `trajectory` (its seed decides the sampling) and return it.

    Ends with "answer" (a turn without a tool call), "length" (a turn that hit a token limit, or an observation that
    does not fit), or "max_turns" (a tool call in the last turn). Raises EpisodeFailed when the tool is unavailable,
    PromptTooLong when no token can be sampled, and whatever `generate` raises.
    """
    trajectory.append_context(prompt_ids, 0)
    if len(prompt_ids) >= limits.max_model_len:
        raise PromptTooLong(
            f"prompt {trajectory.prompt_id!r} has {len(prompt_ids)} tokens; max_model_len is {limits.max_model_len}"
        )
    end = len(prompt_ids) + limits.max_response_tokens
    end = min(end, limits.max_model_len)
    for turn in range(1, limits.max_turns + 1):
        budget = end - len(trajectory)
        max_tokens = budget if limits.max_turn_tokens is None else min(budget, limits.max_turn_tokens)
        sampled = await generate(trajectory.token_ids, max_tokens=max_tokens, seed=turn_seed(trajectory.seed, turn))
        _check_turn(trajectory, sampled, max_tokens)
        trajectory.append_model(sampled.token_ids, sampled.rollout_log_probs, sampled.weight_version, turn)
        stopped = sampled.token_ids[-1] in codec.stop_ids
        text = codec.decode(sampled.token_ids[:-1] if stopped else sampled.token_ids)
        calls = mentions_call(text)
        if not stopped:
            return _finish(trajectory, "length", "" if calls else text)
        if not calls:
            return _finish(trajectory, "answer", text)
        if turn == limits.max_turns:
            break
        call = await _call_tool(trajectory, text, turn, run_tool, limits.max_observation_chars)
        observation = codec.observation_ids(call.output)
        if len(trajectory) + len(observation) >= end:  # not even one model token would fit after it
            call.output = ""  # the model never saw it
            return _finish(trajectory, "length", "")
        trajectory.append_context(observation, turn)
    return _finish(trajectory, "max_turns", "")


def _check_turn(trajectory: Trajectory, sampled: ModelTurn, max_tokens: int) -> None:
    n = len(sampled.token_ids)
    if not 1 <= n <= max_tokens:
        raise RuntimeError(
            f"prompt {trajectory.prompt_id!r} sample {trajectory.sample_index}: the engine returned {n} tokens, "
            f"asked for 1 to {max_tokens}"
        )


def _finish(trajectory: Trajectory, reason: FinishReason, final_text: str) -> Trajectory:
    trajectory.finish_reason = reason
    trajectory.final_text = final_text
    return trajectory


async def _call_tool(trajectory: Trajectory, text: str, turn: int, run_tool: RunTool, max_chars: int) -> ToolCall:
    """Run the call in `text`, record it in the trajectory, and return the record (`output`: the observation)."""
    try:
        parsed = parse_call(text)
    except ParseError as error:
        call = ToolCall(turn, "", "parse_error", parse_error_text(error, max_chars), 0.0)
        trajectory.tool_calls.append(call)
        return call
    started = time.monotonic()
    cause = ""
    result: ExecutionResultLike | None = None
    try:
        result = await run_tool(parsed.code)
    except ToolUnavailable as error:
        cause = f"the tool is unavailable: {error}"
    elapsed = time.monotonic() - started
    if result is not None and result.status not in _STATUSES:
        cause = f"the tool answered with status {result.status!r}"
    if cause or result is None:
        trajectory.tool_calls.append(ToolCall(turn, parsed.code, "infrastructure_error", "", elapsed))
        raise EpisodeFailed(trajectory, cause)
    status: ToolStatus = result.status  # type: ignore[assignment]
    call = ToolCall(turn, parsed.code, status, observation_text(result, max_chars), elapsed)
    trajectory.tool_calls.append(call)
    return call
