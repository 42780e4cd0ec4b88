"""Layers of the local spec: RMSNorm and packed causal attention in plain torch, for machines without TE."""

from __future__ import annotations

from collections.abc import Sequence
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

from ctpo_megatron.data import PackedBatch
from ctpo_megatron.policy.context import ContextSplit
from ctpo_megatron.policy.nodes import rms_norm, rotate, take_rows

SHORTEST_OF_CLASS = 0.95
"""A sequence joins a class of padded attention rows if it has at least this share of the longest one's length."""


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with megatron's constructor; works under sequence parallelism (megatron's wrapper does not)."""

    eps: float  # never None, unlike torch's

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel  # read by megatron's gradient reduction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:  # torch has a fused kernel on CUDA
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps)


def packed_sequences(batch: PackedBatch, split: ContextSplit) -> PackedSeqParams:
    """Megatron's record of a packed micro-batch, extended by what our layers would otherwise read back.

    split: the rows of this rank, for `AttentionPlan`. positions of cu_seqlens: of these rows, for `rotate_packed`.
    """
    longest, boundaries = batch.max_seqlen, batch.cu_seqlens
    boundaries.positions = split.take(batch.position_ids)  # type: ignore[attr-defined] # all that rotary layers receive
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    packed.split = split
    return packed


def rotate_packed(
    t: torch.Tensor,
    cu_seqlens: Any,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> torch.Tensor:
    """Rotary embedding of packed rows t `[t, h, d]` (megatron's `_apply_rotary_pos_emb_thd`, the same bits).

    cu_seqlens: from `packed_sequences`; caches the rotations that all layers share. freqs: angles of all positions,
    `[max_seqlen, 1, 1, d]`. Raises ValueError for interleaved pairs, latent attention and partial rotation.
    """
    if rotary_interleaved or multi_latent_attention or freqs.shape[-1] != t.shape[-1]:
        raise ValueError("packed rows are rotated in halves of whole heads: no interleaved, latent or partial rotation")
    turn = getattr(cu_seqlens, "turn", None)
    if turn is None:
        angles = freqs[:, 0, :, : t.shape[-1] // 2]
        parts = (angles.cos() * mscale, angles.sin() * mscale)
        turn = cu_seqlens.turn = [part.to(t.dtype).index_select(0, cu_seqlens.positions) for part in parts]
    return rotate(t, *turn)


def length_classes(lengths: Sequence[int]) -> list[int]:
    """Class of each sequence for padded attention: from the longest, lengths within `SHORTEST_OF_CLASS` of it."""
    classes = [0] * len(lengths)
    longest, number = None, -1
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if longest is None or lengths[index] < SHORTEST_OF_CLASS * longest:
            longest, number = lengths[index], number + 1
        classes[index] = number
    return classes


def padded_tokens(cu_seqlens: torch.Tensor) -> int:
    """Rows of the local layer spec's attention over these sequences, each padded to the longest of its class."""
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    longest: dict[int, int] = {}
    classes = length_classes(lengths)
    for number, length in zip(classes, lengths, strict=True):
        longest[number] = max(longest.get(number, 0), length)
    return sum(longest[number] for number in classes)


class AttentionPlan:
    """Sequences of a packed batch sorted into classes of similar length (see `length_classes`), on the host.

    Each class is one dense causal attention call on rows padded to its longest member. Padding follows the real tokens,
    where causality hides it from them: the result is exact, and few of the rows are padding. Under context parallelism
    keys and values come from all ranks, queries from this one.

    queries: `[M]`, the query in each row of all classes, class after class; padding repeats the first query of its
    sequence. tokens: the same for keys and values (the same tensor if one rank holds all tokens). back: `[n]`, the row
    of each query. classes: their sizes and masks. split: which tokens the queries are.
    """

    def __init__(self, split: ContextSplit) -> None:
        self.split = split
        planned, device = split.on_host, split.cu_seqlens.device
        cu_seqlens = planned.cu_seqlens * planned.group.size()
        lengths = cu_seqlens.diff()
        number = torch.tensor(length_classes(lengths.tolist()))
        members = [((number == n) & (lengths > 0)).nonzero().squeeze(1) for n in torch.unique(number[lengths > 0])]
        tokens = queries = [_padded_rows(cu_seqlens, of_class) for of_class in members]
        if not split.whole:
            queries = [_padded_rows(planned.cu_seqlens, of_class) for of_class in members]
        asking = torch.cat([index.flatten() for index, _ in queries])
        found = torch.cat([real.flatten() for _, real in queries]).nonzero().squeeze(1)
        back = torch.empty_like(found)
        back[asking[found]] = found
        self.queries, self.back = (index.to(device, non_blocking=True) for index in (asking, back))
        self.tokens = self.queries
        if not split.whole:
            self.tokens = torch.cat([index.flatten() for index, _ in tokens]).to(device, non_blocking=True)
        self.classes = [
            LengthClass(q.shape, k.shape, self._visible(q, k)) for (q, _), (k, _) in zip(queries, tokens, strict=True)
        ]

    def _visible(self, queries: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """Computed on the device: the mask is larger than its inputs."""
        if self.split.whole:
            return None
        device = self.split.rows.device
        position = (self.split.on_host.rows[queries] - tokens[:, :1]).to(device, non_blocking=True)
        return (torch.arange(tokens.shape[1], device=device) <= position[..., None])[:, None]

    def rows_of(self, t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Rows `at` (`queries` or `tokens`) of t. If one rank holds all tokens, padding gets no gradient."""
        return take_rows(t, at, self.back) if self.split.whole else t.index_select(0, at)

    @classmethod
    def of(cls, packed: PackedSeqParams) -> AttentionPlan:
        """The plan of this micro-batch, computed once and stored on the record that all layers share."""
        found = getattr(packed, "attention_plan", None)
        if found is None:
            found = cls(packed.split)
            packed.attention_plan = found
        return found


@dataclass(frozen=True)
class LengthClass:
    """One attention call. queries, tokens: (rows, length) of the queries, and of the keys and values.

    visible: bool `[rows, 1, q, k]`, which keys a query sees; None where queries and keys are the same tokens (plain
    causal attention).
    """

    queries: torch.Size
    tokens: torch.Size
    visible: torch.Tensor | None


def _padded_rows(cu_seqlens: torch.Tensor, members: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index `[rows, longest]` of the tokens of some sequences, and which are real; padding repeats the first."""
    starts, lengths = cu_seqlens[:-1].long()[members], cu_seqlens.diff().long()[members]
    offsets = torch.arange(int(lengths.max()), device=lengths.device)
    real = offsets < lengths[:, None]
    return starts[:, None] + offsets.where(real, 0), real


class PackedCausalAttention(MegatronModule):
    """Core attention for the local spec: block-diagonal causal softmax attention over packed sequences.

    Megatron gives the constructor more keywords than are used here. Query [t, h, d], key and value [t, g, d] (thd
    layout, heads of this tensor-parallel rank, tokens of this context-parallel rank: `ContextSplit`); returns
    [t, 1, h * d]. Other layouts raise ValueError.
    """

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: Any) -> None:
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
            key, value = torch.split(gathered, [key.shape[-1], value.shape[-1]], dim=-1)
        # One gather each, then views: the gradient of a gather has the size of all tokens, however few it selects.
        queries = torch.split(plan.rows_of(query, plan.queries), [part.queries.numel() for part in plan.classes])
        lengths = [part.tokens.numel() for part in plan.classes]
        keys, values = (torch.split(plan.rows_of(t, plan.tokens), lengths) for t in (key, value))
        outputs = []
        for part, *rows in zip(plan.classes, queries, keys, values, strict=True):
            sizes = (part.queries, part.tokens, part.tokens)
            q, k, v = (torch.unflatten(t, 0, size).transpose(1, 2) for t, size in zip(rows, sizes, strict=True))
            out = F.scaled_dot_product_attention(  # [rows, heads, length, d]
                q,
                k,
                v,
                attn_mask=part.visible,
                is_causal=part.visible is None,
                scale=self.softmax_scale,
                enable_gqa=True,
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))  # [rows * length, heads, d]
        packed = torch.cat(outputs).index_select(0, plan.back)
        return packed.reshape(packed.shape[0], 1, -1)


def local_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's local layer spec with the two layers above instead of layers that need TE or apex."""
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
