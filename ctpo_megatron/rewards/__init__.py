"""Rewards: trajectories are scored in their own processes, with hard deadlines and nothing swallowed."""

from ctpo_megatron.rewards.math import last_boxed, score_math
from ctpo_megatron.rewards.pool import RewardPool, ScoreReport
from ctpo_megatron.rewards.protocol import RESERVED, Reward, RewardFunction

__all__ = ["RESERVED", "Reward", "RewardFunction", "RewardPool", "ScoreReport", "last_boxed", "score_math"]
