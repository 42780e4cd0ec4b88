"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values."""

from __future__ import annotations

from ctpo_megatron.models.family import ModelFamily


class Qwen2(ModelFamily):
    """The bias is hard-coded in transformers; config.json has no key for it."""

    architecture = "Qwen2ForCausalLM"
    default_key_value_heads = 32
    qkv_bias = True
