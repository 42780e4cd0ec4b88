"""`rollout.uniform_groups`: what becomes of groups whose rewards are all equal, from which nothing can be learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.batch import Group


def is_uniform(group: Group) -> bool:
    """Whether all rewards that are trained on, shaping included, are equal: every advantage is 0 then."""
    return len(set(group.rewards)) == 1


class UniformGroups:
    """The choice of one step. mini_batch_prompts: groups of one optimizer step. refills: rounds that were drawn."""

    def __init__(self, config: RolloutConfig, mini_batch_prompts: int, refills: int = 0) -> None:
        self._config, self._size = config, mini_batch_prompts
        self.refills = refills

    def missing(self, groups: Sequence[Group]) -> int:
        """How many prompts to draw for another round of refills, given all scored groups; 0: the batch is complete."""
        if self._config.uniform_groups != "refill" or self.refills == self._config.max_refills:
            return 0
        missing = self._config.prompts_per_step - sum(not is_uniform(group) for group in groups)
        self.refills += missing > 0
        return missing

    def drop(self, groups: Sequence[Group]) -> None:
        """Set `dropped` of the uniform groups that are not trained on, given all sampled ones.

        As many stay, the last ones, as the last optimizer step needs to be full; at least one step is made.
        """
        if self._config.uniform_groups == "keep":
            return
        uniform = [group for group in groups if is_uniform(group)]
        mixed = len(groups) - len(uniform)
        steps = max(1, math.ceil(mixed / self._size))
        count = len(groups) - steps * self._size
        for group in uniform[:count]:
            group.dropped = True

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """`rollout/groups_uniform` (share of the sampled groups), `rollout/groups_dropped`, and `rollout/refills` where
        there can be any; nothing when all groups are kept. Comes after `drop`."""
        if self._config.uniform_groups == "keep":
            return {}
        share = sum(map(is_uniform, groups)) / len(groups)
        dropped = sum(group.dropped for group in groups)
        refills = {"rollout/refills": float(self.refills)} if self._config.uniform_groups == "refill" else {}
        return {"rollout/groups_uniform": share, "rollout/groups_dropped": float(dropped), **refills}
