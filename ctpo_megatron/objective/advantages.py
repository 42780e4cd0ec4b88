"""Rewards -> advantages: of a trajectory, for all of its tokens, or of each turn, for the tokens of that turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ctpo_megatron.config import STD_EPSILON, AdvantageConfig

Advantage = float | tuple[float, ...] | None
"""Of a trajectory, or of each of its turns; None without a verdict."""

RewardT = TypeVar("RewardT")
AdvantageT = TypeVar("AdvantageT")


def batch_advantages(groups: Sequence[Sequence[float | None]], config: AdvantageConfig) -> list[float | None]:
    """Advantages of a whole batch, one per trajectory in the order of `groups`, each the rewards of one prompt.

    `mean_baseline` compares every trajectory with the mean of the whole batch, so it works with one sample per prompt;
    `group` and `rloo` compare the samples of one prompt. A reward of None is no verdict: nothing is compared with it,
    and its advantage is None, so the trajectory takes no part in the step. Nor do the others of its group, if fewer
    than two verdicts are left. Raises ValueError as `group_advantages` does.
    """
    return _of_batch(groups, config, lambda rewards: group_advantages(rewards, config).tolist())


def turn_advantages(
    groups: Sequence[Sequence[Sequence[float] | None]], config: AdvantageConfig
) -> list[tuple[float, ...] | None]:
    """Advantages of the turns of a whole batch, a tuple per trajectory in the order of `groups`.

    groups: the returns to go of the turns of each trajectory of a prompt (`Trajectory.returns`). The returns from turn
    k are compared as `batch_advantages` compares rewards. A trajectory that ended before turn k counts 0, for every k.
    So the baseline depends on the other trajectories alone, and no turn pays or charges for a further one
    (docs/notebooks/theory.ipynb). One standard deviation divides all turns of a group, the largest of any turn, so
    that they keep their proportions. Trajectories of one turn have the bits of `batch_advantages`.
    """
    return _of_batch(groups, config, lambda returns: _of_turns(returns, config))


def _of_batch(
    groups: Sequence[Sequence[RewardT | None]],
    config: AdvantageConfig,
    compare: Callable[[Sequence[RewardT]], Sequence[AdvantageT]],
) -> list[AdvantageT | None]:
    if config.kind == "mean_baseline" and groups:  # ranks other than zero have no groups
        groups = [[reward for group in groups for reward in group]]
    return [advantage for rewards in groups for advantage in _of_verdicts(rewards, compare)]


def _of_verdicts(
    rewards: Sequence[RewardT | None], compare: Callable[[Sequence[RewardT]], Sequence[AdvantageT]]
) -> list[AdvantageT | None]:
    verdicts = [reward for reward in rewards if reward is not None]
    if len(verdicts) < min(2, len(rewards)):
        return [None] * len(rewards)
    advantages = iter(compare(verdicts))
    return [None if reward is None else next(advantages) for reward in rewards]


def _of_turns(returns: Sequence[Sequence[float]], config: AdvantageConfig) -> list[tuple[float, ...]]:
    columns = [_checked(column) for column in itertools.zip_longest(*returns, fillvalue=0.0)]
    scale = max(_scale(column, config) for column in columns)
    by_turn = [(_centred(column, config) / scale).to(torch.float32).tolist() for column in columns]
    return [
        tuple(column[place] for column in by_turn[: len(of_trajectory)]) for place, of_trajectory in enumerate(returns)
    ]


def group_advantages(rewards: Sequence[float] | Tensor, config: AdvantageConfig) -> Tensor:
    """Advantages of one group, float32 `[n]`, from its n rewards (sample order kept; computed in float64).

        group           (R_i - mean) / (std + epsilon), unbiased std; without `normalize_std`: R_i - mean
        rloo            R_i - mean of the other n - 1 rewards
        mean_baseline   R_i - mean (`batch_advantages` gives the whole batch as one group)

    Equal rewards give exactly 0, and so does a group of one.
    Raises ValueError for an empty group and for a reward that is not finite, naming its index and value.
    """
    r = _checked(rewards)
    return (_centred(r, config) / _scale(r, config)).to(torch.float32)


def _checked(rewards: Sequence[float] | Tensor) -> Tensor:
    r = torch.as_tensor(rewards, dtype=torch.float64).detach()  # a list of floats would become float32 first
    if r.dim() != 1 or r.numel() == 0:
        raise ValueError(f"rewards must be a non-empty list of numbers; got shape {tuple(r.shape)}")
    for index, value in enumerate(r.tolist()):
        if not float("-inf") < value < float("inf"):
            raise ValueError(f"reward {index} of the group is {value}; rewards must be finite")
    return r


def _centred(r: Tensor, config: AdvantageConfig) -> Tensor:
    n = r.numel()
    # Compare the rewards themselves: rounding of the mean must not turn equal rewards into a tiny advantage.
    if n == 1 or bool((r == r[0]).all()):
        return torch.zeros_like(r)
    centred = r - r.mean()
    if config.kind == "rloo":
        centred = centred * n / (n - 1)
    return centred


def _scale(r: Tensor, config: AdvantageConfig) -> Tensor:
    """What the centred rewards are divided by."""
    if r.numel() == 1 or config.kind != "group" or config.normalize_std is False:
        return torch.ones((), dtype=r.dtype, device=r.device)
    return r.std(correction=1) + (STD_EPSILON if config.epsilon is None else config.epsilon)
