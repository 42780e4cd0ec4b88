"""The dense families: Llama, and what Mistral, Qwen2 and Qwen3 have in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctpo_megatron.models.family import ModelFamily


class Llama(ModelFamily):
    """Llama 2 and 3: the base class, unchanged."""

    architecture = "LlamaForCausalLM"


class Mistral(ModelFamily):
    """Mistral with full attention.

    transformers uses a sliding window of 4096 tokens unless config.json has `"sliding_window": null`.
    """

    architecture = "MistralForCausalLM"
    default_key_value_heads = 8

    def slides(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("sliding_window", 4096) is not None or super().slides(raw)


class Qwen2(ModelFamily):
    """Qwen2 and Qwen2.5. The bias is hard-coded in transformers; config.json has no key for it."""

    architecture = "Qwen2ForCausalLM"
    default_key_value_heads = 32
    qkv_bias = True


class Qwen3(ModelFamily):
    """RMSNorm on each head of queries and keys. The default head size is 128, independent of the hidden size."""

    architecture = "Qwen3ForCausalLM"
    default_key_value_heads = 32
    qk_norm = True
    default_head_dim = 128
