"""Builds megatron-core's GPTModel from a Hugging Face model directory's configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ctpo_megatron.config import NEED_TE, PolicyConfig, against_shared_prefixes
from ctpo_megatron.models import ModelSpec, padded_vocabulary
from ctpo_megatron.plan import (
    Split,
    head_chunk_rows,
)
from ctpo_megatron.policy import device
from ctpo_megatron.policy.layers import activate_at_once, attend_to_whole_sequences, local_block_spec
from ctpo_megatron.policy.optimizer import LossScale
from ctpo_megatron.policy.parallel import gather_objects
from ctpo_megatron.policy.replacements import route_with_te
from ctpo_megatron.policy.router_replay import RouterReplays

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BuiltModel:
    """The model chunks of this rank: one, or one for each virtual pipeline stage.

    wrapped: the chunks wrapped for data parallelism; gpt: the plain GPTModels in them, in the same order.
    streaming: the last stage returns hidden states, and the loss applies the output layer (`passes.py`), with the
    logits of `head_chunk` rows at a time (None: the kernels' default). whole_attention: attention takes whole
    sequences, as Transformer Engine's does. loss_scale: of float16, None otherwise. replays: with
    `policy.router_replay`. shares_prefixes: passes compute tokens with the same history once.
    """

    wrapped: tuple[DistributedDataParallel, ...]
    gpt: tuple[GPTModel, ...]
    config: TransformerConfig
    spec: ModelSpec
    streaming: bool
    head_chunk: int | None
    whole_attention: bool
    loss_scale: LossScale | None
    replays: RouterReplays | None = None
    shares_prefixes: bool = False

    @property
    def output_weight(self) -> torch.nn.Parameter:
        """Output-layer weight of this tensor-parallel rank `[V_padded / tp, H]`; only on the last pipeline stage."""
        last = self.gpt[-1]
        tied = last.share_embeddings_and_output_weights
        weight: torch.nn.Parameter = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
        return weight

    @property
    def output_options(self) -> dict[str, bool]:
        """Keywords of a forward call that keep the last stage's output in the precision of the parameters."""
        return {} if self.config.params_dtype is torch.float32 else {"fp32_output": False}

    @property
    def gradient_scale(self) -> float:
        """The factor by which the gradients of a backward pass are too large: the loss scale."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def zero_gradients(self) -> None:
        """Clear the gradient buffers of all chunks."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()

    def finish_param_gather(self) -> None:
        """Wait for the parameters of the last optimizer step: with `overlap_param_gather` they are stale until then."""
        for chunk in self.wrapped:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def sharded_state(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Sharded state of all chunks for a distributed checkpoint; parameter keys do not depend on the chunks."""
        return {f"chunk{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(self.gpt)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state that `sharded_state` requested from a checkpoint; every key must match."""
        for i, chunk in enumerate(self.gpt):
            chunk.load_state_dict(state[f"chunk{i}"], strict=True)


def transformer_config(spec: ModelSpec, policy: PolicyConfig) -> TransformerConfig:
    """TransformerConfig of a model under the given layout."""
    dtype = DTYPES[policy.dtype]
    use_te = resolve_layer_spec(policy) == "transformer_engine"
    chunks = policy.virtual_pipeline_model_parallel_size
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_key_value_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=policy.tensor_model_parallel_size,
        pipeline_model_parallel_size=policy.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks,
        context_parallel_size=policy.context_parallel_size,
        expert_model_parallel_size=policy.expert_model_parallel_size,
        sequence_parallel=policy.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        # The loss is already divided by the denominators of the whole optimizer step, so gradients are summed
        # everywhere.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # required by variable_seq_lengths, even in dense models
        overlap_p2p_comm=chunks is not None,  # otherwise interleaved stages mix up their messages
        **_recompute(policy, use_te=use_te),
        **spec.family.transformer_options(spec),
        **(_routing(use_te, replay=policy.router_replay) if spec.num_experts else {}),
        **device.transformer_flags(te_layers=use_te, experts=spec.num_experts > 0),
    )


def _recompute(policy: PolicyConfig, *, use_te: bool) -> dict[str, Any]:
    if policy.chosen.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if policy.chosen.recompute == "selective":
        fused = sorted(NEED_TE & set(policy.recompute_modules))
        if fused and not use_te:
            raise RuntimeError(
                f"policy.recompute_modules={fused} need Transformer Engine's layers, and this run has the local ones; "
                "choose among core_attn, mlp, moe, or see why in the line `attention:` of the log"
            )
        return {"recompute_granularity": "selective", "recompute_modules": list(policy.recompute_modules)}
    return {}


def _routing(use_te: bool, *, replay: bool) -> dict[str, Any]:
    """How a mixture of experts is trained, in any family."""
    return {
        "moe_enable_routing_replay": replay,
        "moe_router_fusion": False,  # the fused choice of experts ignores a replay
        "moe_router_dtype": "fp32",
        # No load-balancing loss: it would change weights without any reward for it.
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": use_te,
        "moe_permute_fusion": use_te,
    }


def build_model(spec: ModelSpec, policy: PolicyConfig, here: torch.device) -> BuiltModel:
    """Return the randomly initialized model of this rank; weights come from `hf.load`."""
    config = transformer_config(spec, policy)
    chunks = policy.virtual_pipeline_model_parallel_size
    gpt = [_build_gpt(config, spec, policy, stage).to(here) for stage in (range(chunks) if chunks else (None,))]
    streaming = policy.head == "streaming"
    if streaming and gpt[-1].post_process:
        # The module stays: checkpoints, gradient buffers and conversions refer to its weight by name.
        gpt[-1].output_layer.forward = _pass_hidden_states_through
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=policy.use_distributed_optimizer,
        overlap_grad_reduce=policy.overlap_grad_reduce,
        overlap_param_gather=policy.overlap_param_gather,
    )
    low = config.params_dtype is not torch.float32
    wrapped = tuple(
        DistributedDataParallel(
            config=config, ddp_config=ddp_config, module=Float16Module(config, chunk) if low else chunk
        )
        for chunk in gpt
    )
    loss_scale = LossScale(policy.initial_loss_scale) if config.fp16 else None
    config.grad_scale_func = loss_scale and loss_scale.of
    config.finalize_model_grads_func = _finalize_without_rescaling
    no_sync = [chunk.no_sync for chunk in wrapped]
    config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    head_chunk = _head_chunk(spec, policy) if streaming else None
    replays = RouterReplays.install(gpt, policy) if config.moe_enable_routing_replay else None
    if local := resolve_layer_spec(policy) == "local":
        torch.backends.cuda.enable_cudnn_sdp(False)  # see `layers.PackedCausalAttention`
    against = against_shared_prefixes(policy)
    log.info(
        "prefixes: %s", f"not shared, as {against}" if against else "tokens with the same history are computed once"
    )
    parts = (wrapped, tuple(gpt), config, spec, streaming, head_chunk, not local, loss_scale, replays)
    return BuiltModel(*parts, shares_prefixes=not against)


def _head_chunk(spec: ModelSpec, policy: PolicyConfig) -> int | None:
    """Rows of logits at a time, the same on every rank: for the smallest GPU. Collective on CUDA."""
    if (here := device.gpu_bytes()) is None:
        return policy.head_chunk_tokens
    smallest = min(gather_objects(here))
    rows = head_chunk_rows(spec, Split.of(policy, dist.get_world_size()), smallest)
    log.info("policy.head=streaming: logits of %d rows at a time, on GPUs of %.1f GiB", rows, smallest / 2**30)
    return rows


def _build_gpt(config: TransformerConfig, spec: ModelSpec, policy: PolicyConfig, stage: int | None) -> GPTModel:
    """The model chunk of one virtual pipeline stage (None: the only one)."""
    use_te = resolve_layer_spec(policy) == "transformer_engine"
    route_with_te(use_te)
    layers = (
        get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
        if use_te
        else local_block_spec(config, stage)
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=padded_vocabulary(spec.vocab_size, policy.tensor_model_parallel_size),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tie_word_embeddings,
        vp_stage=stage,
        **spec.family.gpt_options(spec),
    )
    if use_te and not against_shared_prefixes(policy):
        for layer in gpt.decoder.layers:
            attend_to_whole_sequences(layer.self_attention.core_attention)
    if config.use_te_activation_func:
        for layer in gpt.decoder.layers:
            activate_at_once(layer.mlp)
    for name, parameter in gpt.named_parameters():
        if ".mlp.experts." in name:
            # Megatron has a separate optimizer for experts only under expert parallelism. With one kind of optimizer, a
            # checkpoint can be loaded at any expert-parallel size.
            parameter.allreduce = False
    return gpt


def resolve_layer_spec(policy: PolicyConfig) -> str:
    """`local` or `transformer_engine`; raises RuntimeError when the configured one cannot train here."""
    against = device.capabilities().against_te_layers(policy.dtype)
    if policy.layer_spec == "auto":
        return "local" if against else "transformer_engine"
    if against and policy.layer_spec == "transformer_engine":
        raise RuntimeError(f"policy.layer_spec=transformer_engine: {against}, or set policy.layer_spec=local")
    return policy.layer_spec


def gather_gradient_shards(model: BuiltModel) -> None:
    """Complete every rank's gradient buffers to the whole data-parallel sum.

    With the distributed optimizer each rank has the sum of its own shard only.
    """
    groups = [g for chunk in model.wrapped for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    for group in groups:
        members = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            shard = bucket.grad_data.view(members.size(), -1)[members.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=members)


def _pass_hidden_states_through(hidden: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    """Replaces the output layer of GPTModel; returns (output, bias)."""
    return hidden, None


def _finalize_without_rescaling(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kw: object
) -> None:
    finalize_model_grads(model, None, **kw)
