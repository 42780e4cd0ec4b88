"""Rollouts: prompts in, scored batches of groups out, in the order of the run.

`Replay` answers from a recording; `rollout_metrics` summarizes groups. Importing this loads neither Ray nor vLLM.
"""

from ctpo_megatron.rollouts.ahead import AsyncRollouts
from ctpo_megatron.rollouts.estimates import LEVEL, RESAMPLES, bootstrap
from ctpo_megatron.rollouts.evaluation import Evaluation
from ctpo_megatron.rollouts.filters import Filters, filter_problem
from ctpo_megatron.rollouts.metrics import rollout_metrics
from ctpo_megatron.rollouts.quarantine import Quarantined, TooManyQuarantined
from ctpo_megatron.rollouts.replay import Replay, ReplayError
from ctpo_megatron.rollouts.samples import Sample, accuracies, by_problem, by_source, conduct, validation_metrics
from ctpo_megatron.rollouts.scoring import Scoring
from ctpo_megatron.rollouts.source import Collector, Engines, Phase, RolloutSource, SampledRollouts

__all__ = [
    "LEVEL",
    "RESAMPLES",
    "AsyncRollouts",
    "Collector",
    "Engines",
    "Evaluation",
    "Filters",
    "Phase",
    "Quarantined",
    "Replay",
    "ReplayError",
    "RolloutSource",
    "Sample",
    "SampledRollouts",
    "Scoring",
    "TooManyQuarantined",
    "accuracies",
    "bootstrap",
    "by_problem",
    "by_source",
    "conduct",
    "filter_problem",
    "rollout_metrics",
    "validation_metrics",
]
