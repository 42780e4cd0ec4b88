"""Models: a family reads its config.json and derives weights, memory and FLOPs. No torch.

family = FAMILIES["Qwen3ForCausalLM"]
reasons = list(family.refusals(raw))           # of a config.json; empty: supported
spec = family.read(raw)
shapes = family.tensors(spec)                  # of its safetensors files
"""

from __future__ import annotations

from collections.abc import Mapping

from ctpo_megatron.models.dense import Llama, Mistral, Qwen2, Qwen3
from ctpo_megatron.models.family import LayerSplit, ModelFamily
from ctpo_megatron.models.mapping import (
    ParamMapping,
    Shape,
    gate_and_up,
    padded_vocabulary,
    query_key_value,
    replicated,
    row_parallel,
    shard_vocabulary,
    vocabulary,
)
from ctpo_megatron.models.qwen3_moe import Qwen3Moe
from ctpo_megatron.models.spec import ForwardFlops, ModelSpec, Refusal

FAMILIES: Mapping[str, ModelFamily] = {
    family.architecture: family for family in (Qwen2(), Qwen3(), Qwen3Moe(), Llama(), Mistral())
}
"""The built-in families, by the architecture in config.json."""

__all__ = [
    "ForwardFlops",
    "LayerSplit",
    "Llama",
    "Mistral",
    "ModelFamily",
    "ModelSpec",
    "ParamMapping",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "Refusal",
    "Shape",
    "gate_and_up",
    "padded_vocabulary",
    "query_key_value",
    "replicated",
    "row_parallel",
    "shard_vocabulary",
    "vocabulary",
]
