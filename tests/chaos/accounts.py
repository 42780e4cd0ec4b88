"""Where every prompt of a run has gone: what was consumed is trained, quarantined or ahead."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.data.trajectory_file import read_ahead
from ctpo_megatron.tracking import read_trajectories, trajectory_files


@dataclass(frozen=True)
class Accounts:
    """Ids of prompts after a step, as its checkpoint and the dumps have them."""

    consumed: list[str]
    trained: list[str]
    quarantined: list[str]
    buffered: list[str]
    in_flight: list[str]

    @property
    def exact(self) -> bool:
        parts = [*self.trained, *self.quarantined, *self.buffered, *self.in_flight]
        return Counter(self.consumed) == Counter(parts)

    def __str__(self) -> str:
        return (
            f"{len(self.consumed)} consumed = {len(self.trained)} trained + {len(self.quarantined)} quarantined + "
            f"{len(self.buffered)} buffered + {len(self.in_flight)} in flight"
        )


def accounts(run: Path, step: int, samples: int, prompts: Sequence[str]) -> Accounts:
    """Of a run whose checkpoint of that step is there. samples: trajectories per prompt. prompts: all ids."""
    checkpoint = run / "checkpoints" / f"step_{step:06d}"
    state = json.loads((checkpoint / "COMPLETE.json").read_text())["run"]["rollouts"]
    ahead = read_ahead(checkpoint)
    assert ahead is not None
    groups = [group for batch in ahead["batches"] for group in batch["groups"]]
    trained = [
        record["prompt_id"]
        for number, path in trajectory_files(run).items()
        if number <= step
        for record in read_trajectories(path)[::samples]
    ]
    return Accounts(
        [*prompts] * state["prompts"]["epoch"] + state["prompts"]["consumed"],
        trained,
        [record["prompt_id"] for record in state["quarantined"]],
        [group["prompt"] for group in groups if "trajectories" in group],
        [group["prompt"] for group in groups if "trajectories" not in group],
    )
