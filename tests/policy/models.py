"""Tiny random Hugging Face models and recorded trajectories for the policy tests."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ctpo_megatron.data import Trajectory

VOCAB = 500  # not a multiple of 128: the padded columns must not matter
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0}
MIXTURE = {"head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-untied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, MIXTURE | {"norm_topk_prob": True}),
    "qwen3-moe-decided": (Qwen3MoeConfig, Qwen3MoeForCausalLM, MIXTURE | {"norm_topk_prob": True}),
    "qwen3-moe-raw-weights": (Qwen3MoeConfig, Qwen3MoeForCausalLM, MIXTURE | {"norm_topk_prob": False}),
    "qwen2.5": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "llama-3.1-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 32, "sliding_window": None}),
    "linear-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR_ROPE}),
}


def build(family: str, directory: Path, *, layers: int = 4, **shape: int) -> PreTrainedModel:
    """Write a small model of the family and return it; weights are perturbed so that no tensor is trivial.

    shape: of its configuration, instead of the usual.
    """
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(
        config_class(
            **{
                "vocab_size": VOCAB,
                "hidden_size": 96,
                "num_hidden_layers": layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 192,
                "max_position_embeddings": 512,
                **extra,
                **shape,
            }
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        if family == "qwen3-moe-decided":
            _decide(model)
    model.save_pretrained(directory)
    return model


def _decide(model: PreTrainedModel) -> None:
    """Let the token alone choose its two experts in every layer, by far more than activations are rounded.

    Channel e of the residual stream speaks for expert e; a token's embedding sets the channels of its two experts.
    """
    experts = MIXTURE["num_experts"]
    embeddings = model.get_input_embeddings().weight
    for number, (first, second) in enumerate(combinations(range(experts), 2)):
        embeddings[number :: experts * (experts - 1) // 2, [first, second]] += 4.0
    for layer in model.model.layers:
        layer.mlp.gate.weight[:, :experts] += 2.0 * torch.eye(experts)


def trajectories(count: int = 16, seed: int = 0, *, groups: bool = False) -> list[Trajectory]:
    """Prompt, model turn, observation, model turn; lengths vary so that packing matters. groups: of one prompt each."""
    rng = random.Random(seed)
    result = []
    prompt: list[int] = []
    for index in range(count):
        if index % 4 == 0 or not groups:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(3, 30))]
        trajectory = Trajectory(f"p{index // 4}", index % 4, seed=index)
        trajectory.append_context(prompt, turn=0)
        for turn in (1, 2):
            n = rng.randint(1, 25)
            ids = [rng.randrange(VOCAB) for _ in range(n)]
            trajectory.append_model(ids, [-6.0] * n, [0] * n, turn)
            if turn == 1:
                trajectory.append_context([rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))], turn)
        result.append(trajectory)
    return result


def advantages(count: int = 16) -> list[float]:
    """Both signs and zero."""
    return [(-1.0, 0.5, 0.0, 1.3)[index % 4] for index in range(count)]
