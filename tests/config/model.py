"""A small model, and what the rules of training say of a configuration for it."""

from __future__ import annotations

from ctpo_megatron.config import Config, Job, check_training
from ctpo_megatron.models import FAMILIES, ModelSpec
from ctpo_megatron.plan import check_cache

SPEC = ModelSpec(
    family=FAMILIES["Qwen3ForCausalLM"],
    num_layers=2,
    hidden_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
    max_position_embeddings=512,
    vocab_size=512,
)


def found(config: Config, world_size: int = 1, spec: ModelSpec | None = SPEC, cuda: bool = False) -> list[str]:
    """Of a model whose files are elsewhere, or, without a spec, of the configuration's."""
    job = Job(world_size, cuda=cuda)
    problems = [*check_training(config, spec, job, files=spec is None), *check_cache(config, spec, job)]
    return [f"{p.severity}: {p}" for p in problems]
