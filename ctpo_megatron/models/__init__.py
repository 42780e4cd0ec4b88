"""Models: one file per family reads its config.json and derives weights, memory and FLOPs. No torch.

family = FAMILIES["Qwen3ForCausalLM"]
reasons = list(family.refusals(raw))           # of a config.json; empty: supported
spec = family.read(raw)
shapes = family.tensors(spec)                  # of its safetensors files
"""

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
from ctpo_megatron.models.refusal import Refusal
from ctpo_megatron.models.registry import FAMILIES
from ctpo_megatron.models.spec import ModelSpec

__all__ = [
    "FAMILIES",
    "LayerSplit",
    "ModelFamily",
    "ModelSpec",
    "ParamMapping",
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
