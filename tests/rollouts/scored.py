"""Made-up rewards, for tests of what samples and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ctpo_megatron.data.batch import Group


class Scored:
    """Scores that are there at the second look: `reward` of a prompt and a sample's index. The report counts groups."""

    def __init__(self, groups: Sequence[Group], reward: Callable[[str, int], float]) -> None:
        self._groups, self._reward, self._looks = groups, reward, 0

    @property
    def done(self) -> bool:
        self._looks += 1
        return self._looks > 1

    def result(self) -> int:
        for group in self._groups:
            for sample, trajectory in enumerate(group.trajectories):
                trajectory.reward = self._reward(group.prompt.id, sample)
        return len(self._groups)
