"""Trajectory: the append-only record of one episode. Group: a prompt with its trajectories. Batch: a step takes one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctpo_megatron.data.records import NoVerdict, Prompt, ToolCall
from ctpo_megatron.data.tokens import NO_COLUMNS, Column, filled, joined, records

FinishReason = Literal["answer", "length", "max_turns", "tool_budget"]
"""Why an episode ended: an answer without a call, or a limit of tokens, turns or tool use."""


@dataclass(slots=True, eq=False)
class Trajectory:
    """Append-only token record of one episode: the prompt, then alternating model turns and observations.

    tokens: `[T]`, a record of `TOKEN` each, with further columns where an engine reports them; never changed in place.
    The attributes of its columns read like lists. History is never re-rendered or re-tokenized: the tokens that the
    engine sampled are trained on.

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
    tokens: NDArray[np.void] = field(default_factory=lambda: records(0))
    finish_reason: FinishReason | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    final_text: str = ""
    """Decoded text of the final model turn without its stop token."""
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    """The parts of the reward by name, if the reward function returns any."""
    no_verdict: NoVerdict | None = None
    """Why a scored trajectory has no reward: it is no wrong answer, and nothing is learned from it."""
    turn_rewards: list[float] | None = None
    """What each model turn earned; they add up to the reward. None: the reward function does not say."""
    sequence_starts: list[int] = field(default_factory=list)
    """Index of the first token of each further sequence. Empty for an episode whose calls extend one sequence."""
    scored_at: list[float] | None = None
    """Unix times in seconds: when it was given to the scorers, and when its score was there. None: not scored yet."""

    @property
    def token_ids(self) -> Column[int]:
        return Column(self.tokens["token_ids"])

    @property
    def response_mask(self) -> Column[int]:
        return Column(self.tokens["response_mask"])

    @property
    def loss_mask(self) -> Column[int]:
        return Column(self.tokens["loss_mask"])

    @loss_mask.setter
    def loss_mask(self, mask: ArrayLike) -> None:
        # The tokens may be memory of Ray's object store, which cannot be written.
        tokens = self.tokens.copy()
        tokens["loss_mask"] = mask
        self.tokens = tokens

    @property
    def rollout_log_probs(self) -> Column[float]:
        return Column(self.tokens["rollout_log_probs"])

    @property
    def weight_version(self) -> Column[int]:
        return Column(self.tokens["weight_version"])

    @property
    def turn(self) -> Column[int]:
        return Column(self.tokens["turn"])

    def append_model(
        self,
        token_ids: Sequence[int],
        rollout_log_probs: Sequence[float],
        weight_version: Sequence[int],
        turn: int,
        more: Mapping[str, NDArray[Any]] = NO_COLUMNS,
    ) -> None:
        """Append tokens the policy sampled, with one log-probability and one weight version each.

        more: further columns, `[n, ...]` each; they are 0 for all other tokens. Raises ValueError for lengths that
        differ.
        """
        n = len(token_ids)
        if not len(rollout_log_probs) == len(weight_version) == n or any(len(values) != n for values in more.values()):
            raise ValueError(
                f"trajectory {self.prompt_id}#{self.sample_index} turn {turn}: {n} tokens with "
                f"{len(rollout_log_probs)} log-probs and {len(weight_version)} weight versions"
                + "".join(f", {len(values)} of {name}" for name, values in more.items())
            )
        made = records(
            n,
            more,
            token_ids=token_ids,
            rollout_log_probs=rollout_log_probs,
            weight_version=weight_version,
            turn=turn,
            response_mask=1,
            loss_mask=1,
        )
        self.tokens = joined([self.tokens, made])

    def append_context(self, token_ids: Sequence[int], turn: int) -> None:
        """Append tokens the policy did not sample (prompt, tool observation, template)."""
        made = records(len(token_ids), token_ids=token_ids, weight_version=-1, turn=turn)
        self.tokens = joined([self.tokens, made])

    def fill(self, start: int, columns: Mapping[str, NDArray[Any]]) -> None:
        """Set further columns, `[n, ...]` each, of the tokens from `start` on. Raises ValueError for rows beyond."""
        if columns:
            self.tokens = filled(self.tokens, start, columns)

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        ours, theirs = (
            [getattr(each, part.name) for part in fields(self) if part.name != "tokens"] for each in (self, other)
        )
        same = self.tokens.dtype == other.tokens.dtype and self.tokens.tobytes() == other.tokens.tobytes()
        return same and ours == theirs

    @property
    def sequences(self) -> list[slice]:
        """The tokens of each sequence: nothing in one of them is read by another. One, unless an agent began others."""
        bounds = [0, *self.sequence_starts, len(self)]
        return [slice(start, end) for start, end in itertools.pairwise(bounds)]

    @property
    def model_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(np.count_nonzero(self.tokens["response_mask"]))

    @property
    def sequence_model_tokens(self) -> list[int]:
        """Tokens that the policy sampled in each sequence."""
        return [int(np.count_nonzero(self.tokens["response_mask"][tokens])) for tokens in self.sequences]

    @property
    def loss_tokens(self) -> int:
        """Tokens that contribute to the loss."""
        return int(np.count_nonzero(self.tokens["loss_mask"]))

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompt, observations included (the budget that `rollout.max_response_tokens` limits)."""
        return int(np.count_nonzero(self.tokens["turn"]))

    @property
    def turns(self) -> int:
        """Number of the last turn. Raises ValueError for a trajectory without tokens."""
        return int(self.tokens["turn"].max())

    @property
    def returns(self) -> list[float] | None:
        """The return to go of each model turn: what it and all later turns earned; None without a reward.

        Without rewards of turns the last turn earned all of it.
        """
        if self.reward is None:
            return None
        if self.turn_rewards is None:
            return [self.reward] * self.turns
        return [*itertools.accumulate(reversed(self.turn_rewards))][::-1]

    def number_turns(self) -> None:
        """Close the gaps in the numbers of the turns, which turns that were taken back leave."""
        numbers = np.union1d([0], self.tokens["turn"])
        self.tokens = self.tokens.copy()
        self.tokens["turn"] = np.searchsorted(numbers, self.tokens["turn"])
        for call in self.tool_calls:
            call.turn = int(np.searchsorted(numbers, call.turn))

    def facts(self) -> dict[str, Any]:
        """Return all but the tokens, in a plain-JSON form; `of_facts` restores it exactly."""
        record = {name: getattr(self, name) for name in _ALWAYS}
        if self.no_verdict is not None:
            record["no_verdict"] = {name: getattr(self.no_verdict, name) for name in _OF_NO_VERDICT}
        if self.sequence_starts:
            record["sequence_starts"] = self.sequence_starts
        for name in _WHERE_KNOWN:
            if (known := getattr(self, name)) is not None:
                record[name] = known
        # Not `asdict`, which is slow for its deep copies: no reader changes a record.
        return record | {"tool_calls": [{name: getattr(call, name) for name in _OF_CALL} for call in self.tool_calls]}

    @classmethod
    def of_facts(cls, record: Mapping[str, Any], tokens: NDArray[np.void]) -> Trajectory:
        """Inverse of `facts`; fields that a trajectory does not have are ignored. Raises ValueError for impossible
        starts of sequences."""
        known = {each.name: record[each.name] for each in fields(cls) if each.name in record}
        known["sequence_starts"] = [*(record.get("sequence_starts") or ())]
        bounds = [0, *known["sequence_starts"], len(tokens)]
        if len(bounds) > 2 and not all(start < end for start, end in itertools.pairwise(bounds)):
            raise ValueError(f"sequence_starts is {bounds[1:-1]}, of {len(tokens)} tokens: each must be larger")
        missing = record.get("no_verdict")
        return cls(
            **{
                **known,
                "tokens": tokens,
                "tool_calls": [ToolCall(**call) for call in record["tool_calls"]],
                "no_verdict": None if missing is None else NoVerdict(**missing),
            }
        )


_WHERE_KNOWN = ("turn_rewards", "scored_at")
_APART = ("tokens", "no_verdict", "sequence_starts", "tool_calls", *_WHERE_KNOWN)
_ALWAYS = [each.name for each in fields(Trajectory) if each.name not in _APART]
_OF_CALL, _OF_NO_VERDICT = ([each.name for each in fields(kind)] for kind in (ToolCall, NoVerdict))


@dataclass(slots=True)
class Group:
    """All trajectories of one prompt: sampled, scored and trained on as a whole, never in part.

    dropped: whether a batch leaves it out of training (`rollout.uniform_groups`).
    """

    prompt: Prompt
    trajectories: list[Trajectory]
    dropped: bool = False

    @property
    def rewards(self) -> list[float | None]:
        """Rewards in sample order, None without a verdict; raises ValueError when a trajectory was not scored."""
        missing = [t.sample_index for t in self.trajectories if t.reward is None and t.no_verdict is None]
        if missing:
            raise ValueError(f"group {self.prompt.id}: samples {missing} have no reward")
        return [None if t.reward is None else float(t.reward) for t in self.trajectories]

    @property
    def verdicts(self) -> list[float]:
        """The rewards of the trajectories that were judged, in sample order; raises ValueError as `rewards`."""
        return [reward for reward in self.rewards if reward is not None]

    @property
    def returns(self) -> list[list[float] | None]:
        """Returns to go of the turns of each trajectory, None without a verdict; raises ValueError as `rewards`."""
        return [
            None if reward is None else trajectory.returns
            for reward, trajectory in zip(self.rewards, self.trajectories, strict=True)
        ]

    def is_mixed(self, *, by_turn: bool) -> bool:
        """Return whether anything can be learned from it: the rewards of two trajectories differ.

        by_turn: or what they earned from any turn on. One that ended before that turn earned 0 from there on.
        """
        if not by_turn or self.unjudged:
            return len(set(self.verdicts)) > 1
        columns = itertools.zip_longest(*(returns for returns in self.returns if returns is not None), fillvalue=0.0)
        return any(len(set(column)) > 1 for column in columns)

    @property
    def unjudged(self) -> bool:
        """Whether verdicts are missing, and no two trajectories are left to compare."""
        return len(self.verdicts) < min(2, len(self.trajectories))


@dataclass(slots=True)
class Batch:
    """The input of one training step, as `Rollouts` delivers it.

    groups: complete and scored, in the order of sampling, dropped ones included; empty on ranks other than zero, which
    receive the tokens they train on as arrays. metrics: of sampling and scoring. weight_versions: the versions that
    sampled the tokens to train on, ascending.
    """

    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)
    weight_versions: tuple[int, ...] = ()

    @property
    def trained(self) -> list[Group]:
        """The groups that are trained on, in the order of sampling."""
        return [group for group in self.groups if not group.dropped]

    def is_of(self, version: int) -> bool:
        """Return whether these weights alone sampled the whole batch."""
        return self.weight_versions == (version,)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories that are trained on, group by group in sample order."""
        return [trajectory for group in self.trained for trajectory in group.trajectories]
