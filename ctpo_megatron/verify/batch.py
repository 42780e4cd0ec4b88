"""The batch for all layouts, and a model to run it on when none is given."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.data import Trajectory
from ctpo_megatron.data.tokens import ROUTER_CHOICES
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.objective import Advantage

SEQUENCES = 16
LONGEST = 96
SHIFT = 0.08
"""Largest difference between oracle and anchor (nats per token): enough to reach every bound of every objective."""


def trajectories(vocab_size: int, seed: int = 0) -> list[Trajectory]:
    """Prompt, model turn, observation, model turn, of random tokens; at most `LONGEST` tokens each.

    Samples of a prompt begin with it, and two of four with the same first turn, up to its last token.
    """
    rng = random.Random(seed)

    def tokens(fewest: int, most: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(fewest, most))]

    result: list[Trajectory] = []
    prompt, first = list[int](), list[int]()
    for index in range(SEQUENCES):
        if index % 4 == 0:
            prompt = tokens(3, 30)
        trajectory = Trajectory(f"p{index // 4}", index % 4, seed=index)
        trajectory.append_context(prompt, turn=0)
        for turn in (1, 2):
            ids = tokens(1, 24)
            if turn == 1:
                first = ids = first[:-1] + ids[-1:] if index % 2 else ids
            trajectory.append_model(ids, [0.0] * len(ids), [0] * len(ids), turn)
            if turn == 1:
                trajectory.append_context(tokens(1, 9), turn)
        result.append(trajectory)
    return result


def record_experts(recorded: Iterable[Trajectory], spec: ModelSpec) -> None:
    """Give every token but each seventh and the last experts at random, other ones than its router would choose."""
    generator = np.random.default_rng(0)
    for trajectory in recorded:
        order = generator.random((len(trajectory), spec.num_layers, spec.num_experts)).argsort(axis=2)
        choices = order[:, :, : spec.num_experts_per_token].astype(np.min_scalar_type(spec.num_experts - 1))
        choices[::7] = choices[-1] = 0
        trajectory.fill(0, {ROUTER_CHOICES: choices})


def advantages() -> list[float]:
    """Return one advantage per trajectory: both signs, and zero."""
    return [(-1.0, 0.5, 0.0, 1.3)[index % 4] for index in range(SEQUENCES)]


def turn_advantages() -> list[tuple[float, ...]]:
    """Return one for each turn of each trajectory: both signs, and zero. Their loss does not cancel."""
    return [((-1.0, 0.5), (0.5, 0.5), (0.0, 0.9), (1.3, -0.7))[index % 4] for index in range(SEQUENCES)]


def of_tokens(trajectories: Sequence[Trajectory], values: Sequence[Advantage]) -> NDArray[np.float32]:
    """Return the advantage of each token, one trajectory after another; a prompt has the first one."""
    parts = []
    for trajectory, value in zip(trajectories, values, strict=True):
        by_turn = value if isinstance(value, tuple) else (value,) * trajectory.turns
        parts.append(np.array([by_turn[max(turn, 1) - 1] for turn in trajectory.turn], np.float32))
    return np.concatenate(parts)


def shift(index: int, position: int) -> float:
    """Difference of a token's anchor from the oracle's log-prob."""
    return SHIFT * math.sin(7.0 * index + 1.7 * position)


def build_model(directory: Path, *, experts: bool) -> None:
    """Write a random Qwen3 or Qwen3-MoE of 4 layers, whose vocabulary no tile divides; the dense one is tied."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "intermediate_size": 192, "vocab_size": 500}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
    common = {**sizes, **heads, "max_position_embeddings": 512, "pad_token_id": 7}
    if experts:
        mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **mixture))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True))
    with torch.no_grad():  # away from the initial values, where norms are 1 and errors would not show
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
