"""Llama 2 and 3: the decoder that the other families differ from."""

from __future__ import annotations

from ctpo_megatron.models.family import ModelFamily


class Llama(ModelFamily):
    """Nothing differs."""

    architecture = "LlamaForCausalLM"
