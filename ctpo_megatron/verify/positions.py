"""Statistics by position that the log-probs of a layout give in one batch, one trajectory after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ctpo_megatron.data import Trajectory
from ctpo_megatron.objective import Advantage, PolicyObjective, PositionStats, position_stats
from ctpo_megatron.verify.batch import of_tokens
from ctpo_megatron.verify.oracle import SampleKey

TOLERANCE = 1e-12
"""Of the largest sum in a column: the order of the tokens differs."""


def expected_positions(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Advantage],
    log_probs: Mapping[SampleKey, Tensor],
    objective: PolicyObjective,
) -> PositionStats:
    """log_probs: of a layout, float32 `[T]` by (prompt id, sample index). The sampler's are the anchor."""

    def flat(values: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(values))

    lengths = [len(trajectory) for trajectory in trajectories]
    return position_stats(
        torch.cat([log_probs[each.prompt_id, each.sample_index] for each in trajectories]),
        flat([trajectory.tokens["rollout_log_probs"] for trajectory in trajectories]),
        torch.from_numpy(of_tokens(trajectories, advantages)),
        flat([trajectory.tokens["response_mask"] for trajectory in trajectories]),
        flat([trajectory.tokens["loss_mask"] for trajectory in trajectories]),
        objective,
        torch.tensor(np.cumsum([0, *lengths])),
        turn=flat([trajectory.tokens["turn"] for trajectory in trajectories]),
    )
