"""Rewards: trajectories are scored in their own processes, with hard deadlines and nothing swallowed."""

from ctpo_megatron.rewards.answers import canonical
from ctpo_megatron.rewards.math import last_boxed, score_math
from ctpo_megatron.rewards.pool import RewardPool, ScoreReport, Scoring
from ctpo_megatron.rewards.protocol import RESERVED, WORDS, Reward, RewardFunction, reward_problem
from ctpo_megatron.rewards.reference import REFERENCE, reference_answer, score_reference

__all__ = [
    "REFERENCE",
    "RESERVED",
    "WORDS",
    "Reward",
    "RewardFunction",
    "RewardPool",
    "ScoreReport",
    "Scoring",
    "canonical",
    "last_boxed",
    "reference_answer",
    "reward_problem",
    "score_math",
    "score_reference",
]
