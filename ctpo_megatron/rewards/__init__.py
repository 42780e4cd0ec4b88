"""Rewards: trajectories are scored in separate processes, with hard deadlines; every failure is reported."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctpo_megatron.rewards.overlong import OVERLONG, OverlongPenalty
from ctpo_megatron.rewards.pool import RewardPool, ScoreReport, reward_metrics
from ctpo_megatron.rewards.protocol import (
    COUNTS,
    REFERENCE,
    RESERVED,
    WORDS,
    Reward,
    RewardFunction,
    adapter_for,
    reward_problem,
)
from ctpo_megatron.rewards.scorer import Scorer
from ctpo_megatron.rewards.validation import as_products, in_words, shown_words, unverifiable
from ctpo_megatron.rewards.workers import RewardWorkersLost

if TYPE_CHECKING:
    from ctpo_answers import ground_truth_problem, last_boxed, score_math
    from ctpo_megatron.rewards.math import MathVerify

_LATER = {"MathVerify": "ctpo_megatron.rewards.math"}

__all__ = [
    "COUNTS",
    "OVERLONG",
    "REFERENCE",
    "RESERVED",
    "WORDS",
    "MathVerify",
    "OverlongPenalty",
    "Reward",
    "RewardFunction",
    "RewardPool",
    "RewardWorkersLost",
    "ScoreReport",
    "Scorer",
    "adapter_for",
    "as_products",
    "ground_truth_problem",
    "in_words",
    "last_boxed",
    "reward_metrics",
    "reward_problem",
    "score_math",
    "shown_words",
    "unverifiable",
]


def __getattr__(name: str) -> Any:
    """Imports `ctpo_answers` for what it offers here: a login node checks configurations without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER.get(name, "ctpo_answers")), name)
