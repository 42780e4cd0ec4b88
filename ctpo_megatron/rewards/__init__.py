"""Rewards: trajectories are scored in their own processes, with hard deadlines and nothing swallowed."""

from ctpo_megatron.rewards.math import last_boxed, score_math
from ctpo_megatron.rewards.overlong import OVERLONG, OverlongPenalty
from ctpo_megatron.rewards.pool import RewardPool, ScoreReport
from ctpo_megatron.rewards.protocol import RESERVED, WORDS, Reward, RewardFunction, reward_problem

__all__ = [
    "OVERLONG",
    "RESERVED",
    "WORDS",
    "OverlongPenalty",
    "Reward",
    "RewardFunction",
    "RewardPool",
    "ScoreReport",
    "last_boxed",
    "reward_problem",
    "score_math",
]
