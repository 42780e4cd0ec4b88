"""Qwen3: Llama with RMSNorm on each head of queries and keys."""

from __future__ import annotations

from ctpo_megatron.models.family import ModelFamily


class Qwen3(ModelFamily):
    """The default head size is 128, independent of the hidden size."""

    architecture = "Qwen3ForCausalLM"
    default_key_value_heads = 32
    qk_norm = True
    default_head_dim = 128
