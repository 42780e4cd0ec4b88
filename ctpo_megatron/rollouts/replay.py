"""Recorded trajectories in place of engines: the same training again, without vLLM, Ray or a sandbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines.tasks import Cancelled, Sampling
from ctpo_megatron.rollouts.metrics import fleet_stats
from ctpo_megatron.rollouts.quarantine import Quarantined

if TYPE_CHECKING:
    import torch


class ReplayError(Exception):
    """The recording is not of what this run asks for; the message names step, prompt and what was recorded."""


class Replay:
    """Stands where `EnginePool` does, and answers with what an earlier run recorded.

    recorded: step -> the trajectories of its dump, group by group in sample order.
    max_quarantined: most prompts that the recorded run can have lost (its `rollout.max_quarantined`).
    quarantined: the prompts that the recording does without; a resumed replay adds those that it had before.
    refills: whether the groups of a step may be asked for in several calls (`rollout.uniform_groups: refill`).
    """

    def __init__(
        self, recorded: Callable[[int], list[Trajectory]], max_quarantined: int = 0, *, refills: bool = False
    ) -> None:
        self._recorded, self._max_quarantined, self._refills = recorded, max_quarantined, refills
        self._step, self._rest = -1, list[Trajectory]()  # of the step, what no call has asked for yet
        self._counts: Counter[str] = Counter()
        self.quarantined: list[Quarantined] = []

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing runs that would have to be closed."""

    def start(self) -> None:
        """Nothing has to be brought up."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        samples: int,
        sampling: Sampling,
        cancelled: Callable[[], bool] = lambda: False,
        replacement: Callable[[], Prompt] | None = None,
        enough: int | None = None,
        each: Callable[[Group], None] = lambda _: None,
    ) -> list[Group]:
        """The recorded groups of `step`, which must be of these prompts in this order; with refills, the next of them.

        Where the recorded run replaced a prompt, `replacement` is drawn from as that run drew from it.

        The distribution to sample from is that of the recording, whatever `sampling` says. Raises ReplayError, and
        Cancelled when `cancelled()` is true.
        """
        if cancelled():
            self._step = -1
            raise Cancelled(f"step {step} was not replayed")
        first = not self._refills or step != self._step
        if first:
            self._step, self._rest = step, self._recorded(step)
        count = len(prompts) * samples
        if len(self._rest) < count or (len(self._rest) > count and not self._refills):
            found = "were recorded" if first else "are left of the recording"
            raise ReplayError(
                f"step {step}: {len(self._rest)} trajectories {found}, {len(prompts)} prompts x {samples} "
                "samples are needed: set rollout.prompts_per_step and rollout.samples_per_prompt as in the recorded run"
            )
        trajectories, self._rest = self._rest[:count], self._rest[count:]
        recorded = [trajectories[start : start + samples] for start in range(0, len(trajectories), samples)]
        played = list(prompts) if replacement is None else self._replace(prompts, recorded, step, replacement)
        groups = [_group(step, place, played[place], recorded[place]) for place in range(len(played))]
        for group in groups:
            each(group)
        return groups

    def _replace(
        self,
        prompts: Sequence[Prompt],
        recorded: Sequence[list[Trajectory]],
        step: int,
        replacement: Callable[[], Prompt],
    ) -> list[Prompt]:
        """The prompts that were played in place of `prompts`; those that `replacement` does not explain stay.

        The last prompt that a step draws is never lost, or another would have been drawn. So a replay that draws until
        every recorded prompt was met has drawn as many as the recorded run.
        """
        played = list(prompts)
        missing = [place for place, prompt in enumerate(prompts) if prompt.id != recorded[place][0].prompt_id]
        lost = {prompts[place].id for place in missing}
        # The endless stream may give a prompt that is already lost again, but at most twice in a row of such prompts.
        for _ in range(len(missing) + 2 * self._max_quarantined):
            if not missing:
                break
            prompt = replacement()
            place = next((place for place in missing if recorded[place][0].prompt_id == prompt.id), None)
            if place is None:
                lost.add(prompt.id)
            else:
                played[place] = prompt
                missing.remove(place)
        lost -= {record.prompt_id for record in self.quarantined}
        if missing or len(self.quarantined) + len(lost) > self._max_quarantined:
            return list(prompts)  # another recording: the first prompt that differs is reported
        self.quarantined += [Quarantined(name, step, "lost in the recorded run") for name in sorted(lost)]
        self._counts["quarantined"] += len(lost)
        return played

    def begin_sync(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take the weights, as the ranks that give them expect, and forget them."""
        for _ in named_tensors:
            pass

    def stats(self) -> dict[str, float]:
        """The names that `EnginePool.stats` has; all but `quarantined` are 0.

        Comes after the last call of a step: raises ReplayError when more groups of it were recorded.
        """
        if self._rest:
            raise ReplayError(
                f"step {self._step}: {len(self._rest)} more trajectories were recorded than this run asks for: refills "
                "follow from the rewards, so give reward.* and rollout.max_refills as in the recorded run"
            )
        counts, self._counts = self._counts, Counter()
        return fleet_stats(counts)


def _group(step: int, place: int, prompt: Prompt, trajectories: list[Trajectory]) -> Group:
    for index, trajectory in enumerate(trajectories):
        where = f"step {step}, prompt {place + 1} of the batch, sample {index}"
        if (trajectory.prompt_id, trajectory.sample_index) != (prompt.id, index):
            raise ReplayError(
                f"{where}: the run draws prompt {prompt.id!r}, the recording has prompt {trajectory.prompt_id!r} "
                f"(sample {trajectory.sample_index}): give data.train, data.shuffle and run.seed as in the recorded run"
            )
        if trajectory.token_ids[: len(prompt.token_ids)] != list(prompt.token_ids):
            raise ReplayError(
                f"{where}: prompt {prompt.id!r} was recorded with other tokens than this tokenizer and chat template "
                "give: use the recorded run's model.path, chat template, rollout.tool_parser and data.system_prompt"
            )
    return Group(prompt, trajectories)
