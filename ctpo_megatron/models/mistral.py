"""Mistral with full attention: Llama's layers, and another default of a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctpo_megatron.models.family import ModelFamily


class Mistral(ModelFamily):
    """transformers uses a sliding window of 4096 tokens unless config.json has `"sliding_window": null`."""

    architecture = "MistralForCausalLM"
    default_key_value_heads = 8

    def slides(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("sliding_window", 4096) is not None or super().slides(raw)
