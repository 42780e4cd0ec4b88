"""Checks of sampling that runs ahead of the trainer (`rollout.max_staleness`)."""

from __future__ import annotations

from collections.abc import Iterator

from ctpo_megatron.config.problems import Problem, error, warning
from ctpo_megatron.config.schema import Config

_KEY = "rollout.max_staleness"


def check_staleness(config: Config) -> Iterator[Problem]:
    """Both sides have to work at once, and what is sampled must come from engines."""
    rollout = config.rollout
    if not rollout.max_staleness:
        if rollout.partial == "finish":
            message = "has no effect: with rollout.max_staleness: 0 nothing is in flight when weights change"
            yield warning(config, "rollout.partial", message, "leave it out, or raise rollout.max_staleness")
        return
    if config.objective.anchor == "proximal":
        message = "is biased for stale data (rollout.max_staleness): it lacks what updates since its sampling changed"
        yield warning(config, "objective.anchor", message, "leave it out, which takes behaviour, or set decoupled")
    if config.placement.mode == "colocated":
        message = "needs engines that sample while the trainer works; those on its GPUs (placement.mode) sleep then"
        yield error(config, _KEY, message, "set 0, or placement.mode: disaggregated")
    if rollout.replay is not None:
        message = "is for engines; what rollout.replay has recorded has the versions that it was recorded with"
        yield error(config, _KEY, message, "set 0; for a recording that is stale, set objective.anchor: behaviour, too")
