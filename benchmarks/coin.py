"""A reward that random weights meet about half of the time; without one no group would teach them anything."""

from __future__ import annotations

from ctpo_megatron.data import Prompt, Trajectory


def coin(trajectory: Trajectory, prompt: Prompt) -> float:
    """1 for a response of an odd number of tokens."""
    return float(trajectory.response_tokens % 2)
