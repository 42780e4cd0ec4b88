"""Rollouts: prompts in, scored batches of groups out, in the order of the run.

`Rollouts` makes training batches, `Evaluation` answers held-out prompts; both take groups from a `Scheduler` on the
engines, or from the `Replay` of a recording. Importing this loads neither Ray nor vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctpo_megatron.rollouts.evaluation import Evaluated, Evaluation
from ctpo_megatron.rollouts.filters import Filters, filter_problem
from ctpo_megatron.rollouts.ledger import Quarantined, TooManyQuarantined
from ctpo_megatron.rollouts.metrics import rollout_metrics
from ctpo_megatron.rollouts.replay import Replay, ReplayError
from ctpo_megatron.rollouts.request import Answers, Generator, Request, ticks
from ctpo_megatron.rollouts.rollouts import Rollouts, RolloutSettings
from ctpo_megatron.rollouts.samples import (
    LEVEL,
    RESAMPLES,
    Sample,
    accuracies,
    bootstrap,
    by_problem,
    by_source,
    conduct,
    unjudged,
    validation_metrics,
)
from ctpo_megatron.rollouts.scoring import Scorer

if TYPE_CHECKING:
    from ctpo_megatron.rollouts.scheduler import Scheduler

__all__ = [
    "LEVEL",
    "RESAMPLES",
    "Answers",
    "Evaluated",
    "Evaluation",
    "Filters",
    "Generator",
    "Quarantined",
    "Replay",
    "ReplayError",
    "Request",
    "RolloutSettings",
    "Rollouts",
    "Sample",
    "Scheduler",
    "Scorer",
    "TooManyQuarantined",
    "accuracies",
    "bootstrap",
    "by_problem",
    "by_source",
    "conduct",
    "filter_problem",
    "rollout_metrics",
    "ticks",
    "unjudged",
    "validation_metrics",
]


def __getattr__(name: str) -> Any:
    """Import lazily what needs Ray."""
    if name != "Scheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.scheduler").Scheduler
