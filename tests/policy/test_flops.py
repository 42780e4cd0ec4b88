"""The FLOP formula against torch's own counter on the real Hugging Face models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from ctpo_megatron.config import read_spec
from ctpo_megatron.data import token_sequences
from ctpo_megatron.models import ModelSpec
from tests.policy import models

TOKENS = 37


def counted(model: torch.nn.Module, backward: bool) -> int:
    """FLOPs that torch counts in a pass over one sequence; eager attention computes all T * T pairs."""
    ids = torch.arange(TOKENS)[None] % models.VOCAB
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


def masked_pairs(spec: ModelSpec) -> int:
    """FLOPs of the pairs above the diagonal, which a causal model does not need."""
    pairs = TOKENS * (TOKENS - 1) // 2
    return spec.num_layers * pairs * 4 * spec.num_attention_heads * spec.head_dim


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen3-untied", "qwen3-moe", "qwen2.5", "llama", "mistral"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_formula_is_what_torch_counts(family: str, backward: bool, tmp_path: Path) -> None:
    models.build(family, tmp_path)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **eager)
    spec = read_spec(tmp_path)
    passes = 3 if backward else 1  # each product of the forward pass has two gradients of its size
    expected = passes * (spec.forward_flops(TOKENS, TOKENS) + masked_pairs(spec))
    assert counted(model, backward) == expected


def test_prompts_and_tool_output_need_no_output_layer(tmp_path: Path) -> None:
    models.build("qwen3-tied", tmp_path)
    spec = read_spec(tmp_path)
    (trajectory,) = models.trajectories(1)
    (sequence,) = token_sequences([trajectory])
    found = spec.forward_flops(sequence.length, sequence.sampled_tokens)
    left_out = len(trajectory) - sum(trajectory.response_mask)
    assert left_out > 0
    everywhere = spec.forward_flops(len(trajectory), len(trajectory))
    assert found == everywhere - left_out * 2 * spec.hidden_size * spec.vocab_size
