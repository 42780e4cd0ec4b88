"""Evaluation on held-out prompts, with the weights that the engines hold."""

from ctpo_megatron.evaluate.evaluation import Evaluation

__all__ = ["Evaluation"]
