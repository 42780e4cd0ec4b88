"""Outcome rewards -> advantages, to be broadcast to every token of each trajectory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ctpo_megatron.config import AdvantageConfig

STD_EPSILON = 1e-6


def batch_advantages(groups: Sequence[Sequence[float | None]], config: AdvantageConfig) -> list[float | None]:
    """Advantages of a whole batch, one per trajectory in the order of `groups`, each the rewards of one prompt.

    `mean_baseline` compares every trajectory with the mean of the whole batch, so it works with one sample per prompt;
    `group` and `rloo` compare the samples of one prompt. A reward of None is no verdict: nothing is compared with it,
    and its advantage is None, so the trajectory takes no part in the step. Nor do the others of its group, if fewer
    than two verdicts are left. Raises ValueError as `group_advantages` does.
    """
    if config.kind == "mean_baseline" and groups:  # ranks other than zero have no groups
        groups = [[reward for group in groups for reward in group]]
    return [advantage for rewards in groups for advantage in _of_verdicts(rewards, config)]


def _of_verdicts(rewards: Sequence[float | None], config: AdvantageConfig) -> list[float | None]:
    verdicts = [reward for reward in rewards if reward is not None]
    if len(verdicts) < min(2, len(rewards)):
        return [None] * len(rewards)
    advantages = iter(group_advantages(verdicts, config).tolist())
    return [None if reward is None else next(advantages) for reward in rewards]


def group_advantages(rewards: Sequence[float] | Tensor, config: AdvantageConfig) -> Tensor:
    """Advantages of one group, float32 `[n]`, from its n rewards (sample order kept; computed in float64).

        group           (R_i - mean) / (std + 1e-6), unbiased std; without `normalize_std`: R_i - mean
        rloo            R_i - mean of the other n - 1 rewards
        mean_baseline   R_i - mean (`batch_advantages` gives the whole batch as one group)

    Equal rewards give exactly 0, and so does a group of one, with one warning.
    Raises ValueError for an empty group and for a reward that is not finite, naming its index and value.
    """
    r = torch.as_tensor(rewards, dtype=torch.float64).detach()  # a list of floats would become float32 first
    if r.dim() != 1 or r.numel() == 0:
        raise ValueError(f"rewards must be a non-empty list of numbers; got shape {tuple(r.shape)}")
    for index, value in enumerate(r.tolist()):
        if not float("-inf") < value < float("inf"):
            raise ValueError(f"reward {index} of the group is {value}; rewards must be finite")
    n = r.numel()
    if n == 1:
        _warn_group_of_one()
    # Compare the rewards themselves: rounding of the mean must not turn equal rewards into a tiny advantage.
    if n == 1 or bool((r == r[0]).all()):
        return torch.zeros(n, dtype=torch.float32, device=r.device)
    centred = r - r.mean()
    if config.kind == "rloo":
        centred = centred * n / (n - 1)
    elif config.kind == "group" and config.normalize_std is not False:
        centred = centred / (r.std(correction=1) + STD_EPSILON)
    return centred.to(torch.float32)


@functools.cache
def _warn_group_of_one() -> None:
    warnings.warn(
        "a group of one sample has no relative advantage: it is 0 and nothing is learned from the sample "
        "(set rollout.samples_per_prompt to 2 or more)",
        stacklevel=3,
    )
