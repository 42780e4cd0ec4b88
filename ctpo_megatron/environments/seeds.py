"""Sampling seeds as a stable function of prompt, step and sample, so that a run can be repeated token for token."""

from __future__ import annotations

import hashlib

_BITS = 53  # exact as a JSON number in every reader


def _hash(*parts: object) -> int:
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big") >> (64 - _BITS)


def trajectory_seed(run_seed: int, step: int, prompt_id: str, sample_index: int, occurrence: int = 0) -> int:
    """Seed of one trajectory: the top 53 bits of blake2b-64 over the fields joined by the unit separator (0x1f).

    occurrence: how often the step has drawn the prompt before; 0 is no field, so a prompt that is drawn once has the
    same seed as ever. A retried group gets the same seeds, so a fault does not change what is sampled.
    """
    return _hash("trajectory", run_seed, step, prompt_id, sample_index, *([occurrence] if occurrence else []))


def turn_seed(seed: int, turn: int, tokens: int = 0) -> int:
    """Seed of model turn `turn` (from 1) of the trajectory with `seed`, after the first `tokens` tokens of the turn."""
    return _hash("turn", seed, turn, *([tokens] if tokens else []))
