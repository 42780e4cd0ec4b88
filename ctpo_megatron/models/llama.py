"""Llama 2 and 3: the base of the other families."""

from __future__ import annotations

from ctpo_megatron.models.family import ModelFamily


class Llama(ModelFamily):
    """The base class, unchanged."""

    architecture = "LlamaForCausalLM"
