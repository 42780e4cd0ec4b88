"""Rewards: trajectories are scored in separate processes, with hard deadlines; every failure is reported."""

from ctpo_megatron.rewards.answers import canonical, same_answer, votes
from ctpo_megatron.rewards.ground_truth import as_products, ground_truth_problem, in_words, shown_words
from ctpo_megatron.rewards.math import answer_part, last_boxed, score_math
from ctpo_megatron.rewards.overlong import OVERLONG, OverlongPenalty
from ctpo_megatron.rewards.pool import PendingScores, RewardPool, ScoreReport, reward_metrics
from ctpo_megatron.rewards.protocol import RESERVED, WORDS, Reward, RewardFunction, adapter_for, reward_problem
from ctpo_megatron.rewards.reference import REFERENCE, reference_answer, score_reference
from ctpo_megatron.rewards.validation import unverifiable
from ctpo_megatron.rewards.workers import RewardWorkersLost

__all__ = [
    "OVERLONG",
    "REFERENCE",
    "RESERVED",
    "WORDS",
    "OverlongPenalty",
    "PendingScores",
    "Reward",
    "RewardFunction",
    "RewardPool",
    "RewardWorkersLost",
    "ScoreReport",
    "adapter_for",
    "answer_part",
    "as_products",
    "canonical",
    "ground_truth_problem",
    "in_words",
    "last_boxed",
    "reference_answer",
    "reward_metrics",
    "reward_problem",
    "same_answer",
    "score_math",
    "score_reference",
    "shown_words",
    "unverifiable",
    "votes",
]
