"""What the tests import that is not ours: imported once, before any bug is planted."""

# ruff: noqa: F401
import megatron.core.dist_checkpointing
import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.core.pipeline_parallel
import ray
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe
