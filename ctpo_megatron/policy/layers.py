"""Layers of the local spec: RMSNorm and packed causal attention in plain torch, for machines without TE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from ctpo_megatron.policy.context import ContextSplit


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with megatron's constructor; works under sequence parallelism (megatron's wrapper does not)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # read by megatron's gradient reduction


class AttentionPlan:
    """Sequences of a packed batch sorted into classes whose lengths differ by less than a factor of two.

    Each class is one dense causal attention call on rows padded to its longest member. Padding sits behind the
    real tokens, where causality hides it from them, so the result is exact and at most half of the work is padding.
    Under context parallelism keys and values are of all ranks, queries of this one.

    classes: see `LengthClass`. inverse: `[n]`, where query i of the packed order is found in the concatenated real
    queries of all classes. split: which tokens the queries are.
    """

    def __init__(self, cu_seqlens: torch.Tensor) -> None:
        self.split = ContextSplit.of(cu_seqlens)
        lengths, local = cu_seqlens.diff().long(), self.split.cu_seqlens.long()
        self.classes: list[LengthClass] = []
        order: list[torch.Tensor] = []
        keys = torch.log2(lengths.clamp(min=1).float()).floor()
        for key in keys[lengths > 0].unique():
            members = ((keys == key) & (lengths > 0)).nonzero().squeeze(1)
            tokens, _ = _padded_rows(cu_seqlens[:-1].long()[members], lengths[members])
            queries, real = _padded_rows(local[:-1][members], local.diff()[members])
            visible = None
            if not self.split.whole:
                position = self.split.rows[queries] - tokens[:, :1]
                visible = torch.arange(tokens.shape[1], device=tokens.device) <= position[..., None]
            self.classes.append(LengthClass(queries, tokens, real.flatten().nonzero().squeeze(1), visible))
            order.append(queries[real])
        self.inverse = torch.argsort(torch.cat(order))

    @classmethod
    def of(cls, packed: PackedSeqParams) -> AttentionPlan:
        """The plan of this micro-batch, computed once and kept on the record that all layers share."""
        found = getattr(packed, "attention_plan", None)
        if found is None:
            found = cls(packed.cu_seqlens_q)
            packed.attention_plan = found
        return found


@dataclass(frozen=True)
class LengthClass:
    """One attention call. queries `[rows, q]`, tokens `[rows, k]`: index of each query and of each key and value.

    real: flat positions of the queries that are no padding. visible: bool `[rows, q, k]`, which keys a query sees; None
    where queries and keys are the same tokens (plain causal attention).
    """

    queries: torch.Tensor
    tokens: torch.Tensor
    real: torch.Tensor
    visible: torch.Tensor | None


def _padded_rows(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index `[rows, longest]` of each sequence's tokens, and which of them are real; padding repeats the first."""
    offsets = torch.arange(int(lengths.max()), device=lengths.device)
    real = offsets < lengths[:, None]
    return starts[:, None] + offsets.where(real, 0), real


class PackedCausalAttention(MegatronModule):
    """Core attention for the local spec: block-diagonal causal softmax attention over packed sequences.

    Constructor arguments are megatron's core-attention protocol. Query [t, h, d], key and value [t, g, d] (thd
    layout, heads of this tensor-parallel rank, tokens of this context-parallel rank: `ContextSplit`); returns
    [t, 1, h * d]. Other layouts raise ValueError.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("the local layer spec takes packed sequences only (PackedSeqParams, qkv_format='thd')")
        plan = AttentionPlan.of(packed_seq_params)
        if not plan.split.whole:
            both = torch.cat([key, value], dim=-1)
            gathered = gather_from_sequence_parallel_region(both, group=plan.split.group)[plan.split.restore]
            key, value = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
        outputs = []
        for part in plan.classes:
            q, k, v = (  # [rows, heads, length, d]
                t[index].transpose(1, 2)
                for t, index in ((query, part.queries), (key, part.tokens), (value, part.tokens))
            )
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if part.visible is None else part.visible[:, None],
                is_causal=part.visible is None,
                scale=self.softmax_scale,
                enable_gqa=True,
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1)[part.real])  # [real queries, heads, d]
        packed = torch.cat(outputs)[plan.inverse]
        return packed.reshape(packed.shape[0], 1, -1)


def local_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's local layer spec with the two layers above in place of those that need TE or apex."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = [spec] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layers, layer_norm=RMSNorm)
