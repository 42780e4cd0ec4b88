"""The protocol of reward functions: a trajectory and its prompt in, a number or a `Reward` out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ctpo_megatron.base.extensions import use_problem
from ctpo_megatron.rewards.overlong import OVERLONG

if TYPE_CHECKING:
    from ctpo_megatron.data.records import MissingCause, Prompt
    from ctpo_megatron.data.trajectory import Trajectory

WORDS: Mapping[str, str] = {"math_verify": "ctpo_megatron.rewards.math:MathVerify"}
"""Built-in reward functions by their name in a configuration."""
REFERENCE = "ctpo_megatron.rewards.math:ReferenceMath"
"""Import path of the scorer behind CTPO's published accuracies, for `reward.function`."""

COUNTS: Mapping[MissingCause, str] = {
    "timeout": "timeouts",
    "exception": "failures",
    "crash": "crashes",
    "none": "nones",
    "not_finite": "not_finite",
}
"""Metrics `reward/<name>` that count the trajectories without a verdict, by cause."""

RESERVED = frozenset({"mean", "std", "groups_mixed", "no_verdict", "groups_unjudged", *COUNTS.values(), OVERLONG})
"""Reserved names `reward/<name>`, which no component or metric may use."""


_OF_OTHERS = {"completions": "TRL", "solution_str": "verl"}
"""Parameter that the reward functions of another trainer have -> that trainer."""

_SUM: Any = "the sum of turns"

_SUM_TOLERANCE = 1e-9
"""Of `value` against the sum of `turns`, relative to the largest of them."""


@dataclass(frozen=True, slots=True)
class Reward:
    """What a reward function may return instead of a plain number.

    value: the reward that is trained on. None, or any figure that is not finite, is no verdict: the trajectory is
    counted, and nothing is learned from it. May be left out where `turns` are given.
    turns: what each model turn earned, one number a turn, for `objective.credit: turn`; `value` is their sum. A turn of
    None leaves the trajectory without a verdict.
    components: the parts of the value by name. Stored with the trajectory; their means over the step's trajectories are
    the metrics `reward/<name>`.
    metrics: other values by name, also reported as `reward/<name>`: a number is averaged over the trajectories that
    have it, a bool is counted.
    """

    value: float | None = _SUM
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float | bool] = field(default_factory=dict)
    turns: Sequence[float | None] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a value that is not the sum of the turns, and without either."""
        if self.turns is None:
            if self.value is _SUM:
                raise ValueError("Reward: give value, or turns, whose sum it is")
            return
        judged = [float(turn) for turn in self.turns if turn is not None]
        total = math.fsum(judged) if len(judged) == len(self.turns) else None
        if self.value is _SUM:
            object.__setattr__(self, "value", total)
        elif self.value is not None and total is not None:
            tolerance = _SUM_TOLERANCE * max(map(abs, [1.0, *judged]))
            if abs(float(self.value) - total) > tolerance:  # NaN is no verdict, which the caller finds
                raise ValueError(
                    f"Reward: value is {float(self.value):g}, but turns {judged} add up to {total:g}; leave value out, "
                    "or give their sum"
                )


class RewardFunction(Protocol):
    """A function, or an instance of a class that each worker creates once with the configured arguments.

    A function is called with the arguments as keywords. Either may be `async`. With an attribute `text_only = True`
    its trajectories and prompts come without their per-token lists, which saves time when they are long.
    """

    def __call__(
        self, trajectory: Trajectory, prompt: Prompt, /, **arguments: Any
    ) -> float | Reward | Awaitable[float | Reward | None] | None: ...


def reward_problem(part: Any, arguments: Mapping[str, Any]) -> str:
    """Return why a user's object cannot score with these arguments, or ""."""
    problem = use_problem(part, ("trajectory", "prompt"), arguments)
    adapter = adapter_for(part) if problem else ""
    return f"{problem}; {adapter}" if adapter else problem


def adapter_for(part: Any) -> str:
    """Return where the adapter of a reward function of another trainer is, known by the names of its
    parameters; or "".
    """
    method = inspect.getattr_static(part, "__call__") if isinstance(part, type) else part
    try:
        names = inspect.signature(method).parameters
    except (TypeError, ValueError):  # no function, or one written in C without a signature
        return ""
    trainer = next((trainer for name, trainer in _OF_OTHERS.items() if name in names), "")
    return f"{trainer} calls such functions: docs/coming_from.md has an adapter of a few lines" if trainer else ""
