"""Rewards: answers are scored in their own processes, with hard deadlines and nothing swallowed."""

from ctpo_megatron.rewards.math import last_boxed, score_math
from ctpo_megatron.rewards.pool import RewardPool, Scorer, ScoreReport

__all__ = ["RewardPool", "ScoreReport", "Scorer", "last_boxed", "score_math"]
