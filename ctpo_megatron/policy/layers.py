"""Layers of the local spec: RMSNorm and packed causal attention in plain torch, for machines without TE."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with megatron's constructor; works under sequence parallelism (megatron's wrapper does not)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # read by megatron's gradient reduction


class LengthClasses:
    """Sequences of a packed batch sorted into classes whose lengths differ by less than a factor of two.

    Each class is one dense causal attention call on rows padded to its longest member. Padding sits behind the
    real tokens, where causality hides it from them, so the result is exact and at most half of the work is padding.

    classes: per class (index [rows, length] into the packed tokens, flat positions of the real tokens in it).
    inverse: [N], where token i of the packed order is found in the concatenated real tokens of all classes.
    """

    def __init__(self, cu_seqlens: torch.Tensor) -> None:
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        keys = torch.log2(lengths.clamp(min=1).float()).floor()
        self.classes: list[tuple[torch.Tensor, torch.Tensor]] = []
        order: list[torch.Tensor] = []
        for key in keys[lengths > 0].unique():
            members = ((keys == key) & (lengths > 0)).nonzero().squeeze(1)
            offsets = torch.arange(int(lengths[members].max()), device=cu_seqlens.device)
            real = offsets < lengths[members, None]
            index = starts[members, None] + offsets.where(real, 0)
            self.classes.append((index, real.flatten().nonzero().squeeze(1)))
            order.append(index[real])
        self.inverse = torch.argsort(torch.cat(order))

    @classmethod
    def of(cls, packed: PackedSeqParams) -> LengthClasses:
        """The classes of this micro-batch, computed once and kept on the record that all layers share."""
        found = getattr(packed, "length_classes", None)
        if found is None:
            found = cls(packed.cu_seqlens_q)
            packed.length_classes = found
        return found


class PackedCausalAttention(MegatronModule):
    """Core attention for the local spec: block-diagonal causal softmax attention over packed sequences.

    Constructor arguments are megatron's core-attention protocol. Query [t, h, d], key and value [t, g, d] (thd
    layout, heads of this tensor-parallel rank); returns [t, 1, h * d]. Other layouts raise ValueError.
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
        plan = LengthClasses.of(packed_seq_params)
        outputs = []
        for index, real in plan.classes:
            q, k, v = (t[index].transpose(1, 2) for t in (query, key, value))  # [rows, heads, length, d]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True)
            outputs.append(out.transpose(1, 2).flatten(0, 1)[real])  # [real tokens, heads, d]
        packed = torch.cat(outputs)[plan.inverse]
        return packed.reshape(packed.shape[0], 1, -1)


def local_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layer spec with the two layers above in place of those that need TE or apex."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules([spec] * get_num_layers_to_build(config), layer_norm=RMSNorm)
