"""Builds megatron-core's GPTModel from a Hugging Face model directory's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from ctpo_megatron.config import ModelFacts, PolicyConfig
from ctpo_megatron.policy import device
from ctpo_megatron.policy.layers import local_block_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class BuiltModel:
    """The model of this rank: wrapped for data parallelism, and as plain GPTModel.

    streaming: the last stage gives hidden states, and the output layer is applied by the loss (`predictions.py`).
    """

    wrapped: DistributedDataParallel
    gpt: GPTModel
    config: TransformerConfig
    facts: ModelFacts
    streaming: bool

    @property
    def output_weight(self) -> torch.nn.Parameter:
        """Output-layer weight of this tensor-parallel rank `[V_padded / tp, H]`; only on the last pipeline stage."""
        tied = self.gpt.share_embeddings_and_output_weights
        return self.gpt.shared_embedding_or_output_weight() if tied else self.gpt.output_layer.weight

    @property
    def output_options(self) -> dict[str, bool]:
        """Keywords of a forward call that keep the last stage's output in the precision of the parameters."""
        return {"fp32_output": False} if self.config.bf16 else {}


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Vocabulary rows that megatron holds: the next multiple of 128 per tensor-parallel rank."""
    multiple = 128 * tensor_parallel
    return math.ceil(vocab_size / multiple) * multiple


def transformer_config(facts: ModelFacts, policy: PolicyConfig) -> TransformerConfig:
    """TransformerConfig of a dense Qwen2.5, Qwen3 or Llama model under the given layout."""
    dtype = DTYPES[policy.dtype]
    return TransformerConfig(
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        ffn_hidden_size=facts.intermediate_size,
        num_attention_heads=facts.num_attention_heads,
        num_query_groups=facts.num_key_value_heads,
        kv_channels=facts.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=facts.rms_norm_eps,
        qk_layernorm=facts.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=facts.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=policy.tensor_model_parallel_size,
        pipeline_model_parallel_size=policy.pipeline_model_parallel_size,
        sequence_parallel=policy.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        recompute_granularity="full" if policy.recompute == "full" else None,
        recompute_method="uniform" if policy.recompute == "full" else None,
        recompute_num_layers=1 if policy.recompute == "full" else None,
        # The loss arrives already divided by the denominators of the whole optimizer step: plain sums everywhere.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it, in dense models too
        **device.transformer_flags(),
    )


def build_model(facts: ModelFacts, policy: PolicyConfig, here: torch.device) -> BuiltModel:
    """The randomly initialized model of this rank; weights come from `hf.load`."""
    config = transformer_config(facts, policy)
    use_te = resolve_layer_spec(policy) == "transformer_engine"
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True) if use_te else local_block_spec(config)
    scaling = facts.rope_scaling or {}
    factor = float(scaling.get("factor", 8.0))
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(facts.vocab_size, policy.tensor_model_parallel_size),
        max_sequence_length=facts.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=facts.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=facts.rope_theta,
        rope_scaling=scaling.get("rope_type") == "llama3",
        rope_scaling_factor=factor,
        seq_len_interpolation_factor=factor if scaling.get("rope_type") == "linear" else None,
    ).to(here)
    streaming = policy.head == "streaming"
    if streaming and gpt.post_process:
        # The module stays where it is: its weight has names in checkpoints, gradient buffers and conversions.
        gpt.output_layer.forward = _pass_hidden_states_through
    module: MegatronModule = Float16Module(config, gpt) if config.bf16 else gpt
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=policy.use_distributed_optimizer,
        ),
        module=module,
    )
    config.finalize_model_grads_func = _finalize_without_rescaling
    config.no_sync_func = wrapped.no_sync
    return BuiltModel(wrapped, gpt, config, facts, streaming)


def resolve_layer_spec(policy: PolicyConfig) -> str:
    """`local` or `transformer_engine`; raises RuntimeError when the one asked for is not installed."""
    found = device.capabilities()
    if policy.layer_spec == "auto":
        return found.layer_spec
    if policy.layer_spec == "transformer_engine" and not found.transformer_engine:
        raise RuntimeError(
            "policy.layer_spec=transformer_engine, but transformer-engine with CUDA was not found; "
            "install it (requirements/cuda.txt) or use policy.layer_spec=local"
        )
    return policy.layer_spec


def gather_gradient_shards(model: BuiltModel) -> None:
    """Bring every rank's gradient buffers to the whole data-parallel sum.

    The distributed optimizer leaves each rank with the sum of its own shard only.
    """
    for group in model.wrapped.bucket_groups:
        members = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            shard = bucket.grad_data.view(members.size(), -1)[members.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=members)


def _pass_hidden_states_through(hidden: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    """What GPTModel calls instead of the output layer: (output, bias)."""
    return hidden, None


def _finalize_without_rescaling(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kw: object
) -> None:
    finalize_model_grads(model, None, **kw)
