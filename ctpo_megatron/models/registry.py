"""The built-in families, by the architecture in config.json."""

from __future__ import annotations

from collections.abc import Mapping

from ctpo_megatron.models.family import ModelFamily
from ctpo_megatron.models.llama import Llama
from ctpo_megatron.models.mistral import Mistral
from ctpo_megatron.models.qwen2 import Qwen2
from ctpo_megatron.models.qwen3 import Qwen3
from ctpo_megatron.models.qwen3_moe import Qwen3Moe

FAMILIES: Mapping[str, ModelFamily] = {
    family.architecture: family for family in (Qwen2(), Qwen3(), Qwen3Moe(), Llama(), Mistral())
}
