"""Rewards: trajectories are scored in separate processes, with hard deadlines; every failure is reported."""

from typing import TYPE_CHECKING

from ctpo_megatron.base.front_door import import_when_used
from ctpo_megatron.rewards.overlong import OVERLONG, OverlongPenalty
from ctpo_megatron.rewards.pool import RewardPool, Scorer, ScoreReport
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
from ctpo_megatron.rewards.validation import as_products, in_words, shown_words, unverifiable
from ctpo_megatron.rewards.workers import RewardWorkersLost

if TYPE_CHECKING:  # a login node checks configurations without ctpo_answers
    from ctpo_answers import ground_truth_problem, last_boxed, score_math
    from ctpo_megatron.rewards.math import MathVerify

__all__ = ["MathVerify", "Reward", "RewardFunction", "ground_truth_problem", "last_boxed", "score_math"]
"""What users' parts import."""

__getattr__ = import_when_used(__name__)
