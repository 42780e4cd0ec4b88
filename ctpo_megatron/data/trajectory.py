"""Trajectory: the append-only record of one episode, with its tool calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

FinishReason = Literal["answer", "length", "max_turns", "tool_budget"]
"""Why an episode ended: an answer without a call, or a limit of tokens, turns or tool use."""

ToolStatus = Literal["success", "runtime_error", "timeout", "parse_error", "infrastructure_error"]
TOOL_STATUSES: tuple[ToolStatus, ...] = get_args(ToolStatus)


@dataclass(slots=True)
class ToolCall:
    """One tool call of an episode. `output` is the observation text as the model saw it.

    name, arguments: empty when the call could not be read (status "parse_error"). wall_s: seconds from the call to its
    answer. exec_s: seconds of execution, as reported by the tool's service; None if unknown.
    """

    turn: int
    name: str
    arguments: dict[str, Any]
    status: ToolStatus
    output: str
    wall_s: float
    exec_s: float | None = None

    @property
    def queue_s(self) -> float | None:
        """Seconds of queueing and transfer; None if `exec_s` is unknown."""
        return None if self.exec_s is None else max(0.0, self.wall_s - self.exec_s)


MissingCause = Literal["timeout", "exception", "crash", "none", "not_finite"]
"""Why there is no verdict: the reward function took too long, raised, its process died, or it returned None or a figure
that is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """Stands for the reward of a trajectory that was not judged. reason: one line for people."""

    cause: MissingCause
    reason: str


@dataclass(slots=True)
class Trajectory:
    """Append-only token record of one episode: the prompt, then alternating model turns and observations.

    The six per-token lists always have the same length. History is never re-rendered or re-tokenized: the tokens that
    the engine sampled are trained on.

    token_ids: vocabulary ids.
    response_mask: 1 where the policy sampled the token, else 0 (prompt, observation, template).
    loss_mask: 1 where the token contributes to the loss; never 1 where response_mask is 0.
    rollout_log_probs: log-probability (nats) under the distribution sampled from; 0.0 where response_mask is 0.
    weight_version: version of the weights that sampled the token; -1 where response_mask is 0.
    turn: 0 for the prompt, then 1, 2, ... ; an observation carries the number of the turn that caused it.
    """

    prompt_id: str
    sample_index: int
    seed: int
    token_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    weight_version: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    final_text: str = ""
    """Decoded text of the final model turn without its stop token."""
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    """The parts of the reward by name, if the reward function returns any."""
    no_verdict: NoVerdict | None = None
    """Why a scored trajectory has no reward: it is no wrong answer, and nothing is learned from it."""

    def append_model(
        self, token_ids: Sequence[int], rollout_log_probs: Sequence[float], weight_version: Sequence[int], turn: int
    ) -> None:
        """Append tokens the policy sampled, with one log-probability and one weight version each."""
        n = len(token_ids)
        self._extend(token_ids, [1] * n, rollout_log_probs, weight_version, turn)

    def append_context(self, token_ids: Sequence[int], turn: int) -> None:
        """Append tokens the policy did not sample (prompt, tool observation, template)."""
        n = len(token_ids)
        self._extend(token_ids, [0] * n, [0.0] * n, [-1] * n, turn)

    def _extend(
        self,
        token_ids: Sequence[int],
        mask: Sequence[int],
        rollout_log_probs: Sequence[float],
        weight_version: Sequence[int],
        turn: int,
    ) -> None:
        n = len(token_ids)
        if not len(mask) == len(rollout_log_probs) == len(weight_version) == n:
            raise ValueError(
                f"trajectory {self.prompt_id}#{self.sample_index} turn {turn}: {n} tokens with "
                f"{len(rollout_log_probs)} log-probs and {len(weight_version)} weight versions"
            )
        self.token_ids += token_ids
        self.response_mask += mask
        self.loss_mask += mask
        self.rollout_log_probs += rollout_log_probs
        self.weight_version += weight_version
        self.turn += [turn] * n

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompt, observations included (the budget that `rollout.max_response_tokens` limits)."""
        return sum(1 for turn in self.turn if turn > 0)

    def to_json(self) -> dict[str, Any]:
        """A plain-JSON form that `from_json` restores exactly (Python floats round-trip through JSON)."""
        # `asdict` of the trajectory would copy every number separately.
        record = {each.name: copy.copy(getattr(self, each.name)) for each in fields(self) if each.name != "no_verdict"}
        if self.no_verdict is not None:
            record["no_verdict"] = asdict(self.no_verdict)
        return record | {"tool_calls": [asdict(call) for call in self.tool_calls]}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Trajectory:
        """Inverse of `to_json`."""
        calls = [ToolCall(**call) for call in record["tool_calls"]]
        missing = record.get("no_verdict")
        return cls(**{**record, "tool_calls": calls, "no_verdict": None if missing is None else NoVerdict(**missing)})
