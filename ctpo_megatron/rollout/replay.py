"""Recorded trajectories in place of engines: the same training again, without vLLM, Ray or a sandbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ctpo_megatron.data.records import Group, Prompt, Trajectory
from ctpo_megatron.rollout.metrics import fleet_stats
from ctpo_megatron.rollout.tasks import Cancelled, Sampling

if TYPE_CHECKING:
    import torch


class ReplayError(Exception):
    """The recording is not of what this run asks for; the message names step, prompt and what was recorded."""


class Replay:
    """Stands where `RolloutFleet` does, and answers with what an earlier run recorded.

    recorded: step -> the trajectories of its dump, group by group in sample order.
    """

    def __init__(self, recorded: Callable[[int], list[Trajectory]]) -> None:
        self._recorded = recorded

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
    ) -> list[Group]:
        """The recorded groups of `step`, which must be of these prompts in this order.

        The distribution to sample from is that of the recording, whatever `sampling` says. Raises ReplayError, and
        Cancelled when `cancelled()` is true.
        """
        if cancelled():
            raise Cancelled(f"step {step} was not replayed")
        trajectories = self._recorded(step)
        if len(trajectories) != len(prompts) * samples:
            raise ReplayError(
                f"step {step}: {len(trajectories)} trajectories were recorded, {len(prompts)} prompts x {samples} "
                "samples are needed: set rollout.prompts_per_step and rollout.samples_per_prompt as in the recorded run"
            )
        return [
            _group(step, place, prompt, trajectories[place * samples : (place + 1) * samples])
            for place, prompt in enumerate(prompts)
        ]

    def sync(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take the weights, as the ranks that give them expect, and forget them."""
        for _ in named_tensors:
            pass

    def stats(self) -> dict[str, float]:
        """The names that `RolloutFleet.stats` has, all 0."""
        return fleet_stats(Counter())


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
                "give: use the recorded run's model.path, model.chat_template_kwargs and data.tool_in_prompt"
            )
    return Group(prompt, trajectories)
