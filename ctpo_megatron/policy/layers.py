"""Layers of the local spec, for machines without TE: RMSNorm, packed causal attention, rotary embedding, SwiGLU.

RMSNorm and rotary embedding are one node of the autograd graph each. Composed of torch's operations they would be
several, and every node reads and writes all rows, which is slower on a CPU (benchmarks/results/nodes.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable

from ctpo_kernels import rotate, swiglu
from ctpo_megatron.data import PackedBatch
from ctpo_megatron.policy.attention_plan import AttentionPlan, ForestPlan, WholeSequences
from ctpo_megatron.policy.context import ContextSplit, gather_rows, take_rows
from ctpo_megatron.policy.megatron_versions import LATENT_ROTARY

Rotation = Callable[..., torch.Tensor]
_WIDEST_FLASH_HEAD = 256
"""Numbers of a head that flash attention takes at most."""


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


def packed_sequences(batch: PackedBatch, split: ContextSplit, *, whole_attention: bool) -> PackedSeqParams:
    """Megatron's record of a packed micro-batch, extended by what our layers would otherwise read back.

    split: the rows of this rank. whole_attention: layers take whole sequences, which a forest has in `whole`; other
    layers share `attention_plan`. take: from values of the tokens to values of the rows.
    positions of cu_seqlens: of these rows, for `rotate_packed` and `rotate_rows`.
    """
    longest, boundaries, take = batch.max_seqlen, batch.cu_seqlens, split.take
    plan: AttentionPlan | ForestPlan | None = None
    whole = None
    if batch.forest is not None and whole_attention:
        whole = WholeSequences.of(batch)
        take, boundaries = whole.take, boundaries.detach()  # with attributes of its own
        boundaries.of_rows = True  # type: ignore[attr-defined]
    elif batch.forest is not None:
        plan = ForestPlan.of(batch)
        take, boundaries = plan.take, plan.boundaries
    elif not whole_attention:
        plan = AttentionPlan(split)
    boundaries.positions = take(batch.position_ids)  # type: ignore[attr-defined] # all that rotary layers receive
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    packed.split, packed.attention_plan, packed.take, packed.whole = split, plan, take, whole
    return packed


def rotate_packed(
    t: torch.Tensor,
    cu_seqlens: Any,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    **latent: bool,
) -> torch.Tensor:
    """Rotary embedding of packed rows t `[t, h, d]` (megatron's `_apply_rotary_pos_emb_thd`, the same bits).

    cu_seqlens: from `packed_sequences`; caches the rotations that all layers share. freqs: angles of all positions,
    `[max_seqlen, 1, 1, d]`. latent: whether it is latent attention, under the name of this release (`LATENT_ROTARY`).
    Raises ValueError for interleaved pairs, latent attention and partial rotation.
    """
    if rotary_interleaved or latent.get(LATENT_ROTARY) or freqs.shape[-1] != t.shape[-1]:
        raise ValueError("packed rows are rotated in halves of whole heads: no interleaved, latent or partial rotation")
    turn = getattr(cu_seqlens, "turn", None)
    if turn is None:
        angles = freqs[:, 0, :, : t.shape[-1] // 2]
        parts = (angles.cos() * mscale, angles.sin() * mscale)
        turn = cu_seqlens.turn = [part.to(t.dtype).index_select(0, cu_seqlens.positions) for part in parts]
    return rotate(t, *turn)


def rotate_rows(fused_packed: Rotation, fused: Rotation) -> Rotation:
    """Wrap Transformer Engine's rotation of packed sequences, which counts positions from `cu_seqlens`, for forests.

    fused_packed: that rotation. fused: the same for one sequence `[n, 1, h, d]` with the angles of all its positions.
    """

    def rotate(t: torch.Tensor, cu_seqlens: Any, freqs: torch.Tensor, **how: Any) -> torch.Tensor:
        if not getattr(cu_seqlens, "of_rows", False):
            return fused_packed(t, cu_seqlens, freqs, **how)
        angles = getattr(cu_seqlens, "angles", None)
        if angles is None:
            angles = cu_seqlens.angles = freqs.index_select(0, cu_seqlens.positions)
        return fused(t[:, None], angles)[:, 0]

    return rotate


def attend_to_whole_sequences(attention: torch.nn.Module) -> None:
    """Have a core attention of whole sequences take the rows of forests.

    It gets queries, keys and values of every token, and its output `[N, ...]` is taken back to the rows. A row's query
    gets the gradient of one token. The gradients of its key and value in all sequences add up.
    """
    attend = attention.forward

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, packed_seq_params: Any, **more: Any
    ) -> torch.Tensor:
        whole = packed_seq_params.whole
        if whole is not None:
            query = take_rows(query, whole.row, whole.first)
            key, value = gather_rows(key, whole.row), gather_rows(value, whole.row)
        output: torch.Tensor = attend(query, key, value, *others, packed_seq_params=packed_seq_params, **more)
        return output if whole is None else output.index_select(0, whole.first)

    attention.forward = forward


def activate_at_once(mlp: torch.nn.Module) -> None:
    """Have a dense MLP compute its SwiGLU by our kernel, where the configuration has `use_te_activation_func`.

    torch would compile megatron-core's own, and check in every call whether the compiled code fits.
    """
    mlp.activation_func = swiglu  # type: ignore[assignment]


def compile_layers(config: TransformerConfig, device: torch.device) -> None:
    """Compile the kernels of these layers, by calls on a few rows as large as this rank's. Other layers need none."""
    ranks, like = config.tensor_model_parallel_size, {"dtype": config.params_dtype, "device": device}
    for heads in {config.num_attention_heads // ranks, config.num_query_groups // ranks}:
        t = torch.zeros(2, heads, config.kv_channels, **like).requires_grad_()
        angles = torch.zeros(2, 1, config.kv_channels // 2, **like)
        rotate(t, angles, angles).sum().backward()
    if config.use_te_activation_func:
        swiglu(torch.zeros(2, 2 * config.ffn_hidden_size // ranks, **like).requires_grad_()).sum().backward()


def _takes_grouped_keys(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a fused back end of torch's attention takes fewer heads of keys than of queries.

    On CUDA that is flash attention, which takes 16 bits and no mask (torch 2.13, `sdp_utils.cpp`). The memory-efficient
    back end does not. Without any, torch writes out scores of quadratic size. The one of cuDNN is off: it compiles a
    plan for each shape, in tens of milliseconds of host time, and keeps all of them.
    """
    return not query.is_cuda or (
        mask is None and query.dtype is not torch.float32 and query.shape[-1] <= _WIDEST_FLASH_HEAD
    )


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
        plan, split = packed_seq_params.attention_plan, packed_seq_params.split
        if not split.whole:
            both = torch.cat([key, value], dim=-1)
            gathered = gather_from_sequence_parallel_region(both, group=split.group)[split.restore]
            key, value = torch.split(gathered, [key.shape[-1], value.shape[-1]], dim=-1)
        # One gather each, then views: the gradient of a gather has the size of all tokens, however few it selects.
        queries = torch.split(plan.rows_of(query, plan.queries), [part.queries.numel() for part in plan.classes])
        lengths = [part.tokens.numel() for part in plan.classes]
        keys, values = (torch.split(plan.rows_of(t, plan.tokens), lengths) for t in (key, value))
        outputs = []
        for part, mask, *rows in zip(plan.classes, plan.masks(query.dtype), queries, keys, values, strict=True):
            sizes = (part.queries, part.tokens, part.tokens)
            q, k, v = (torch.unflatten(t, 0, size).transpose(1, 2) for t, size in zip(rows, sizes, strict=True))
            grouped = _takes_grouped_keys(q, mask)
            if not grouped:
                k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
            out = F.scaled_dot_product_attention(  # [rows, heads, length, d]
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.softmax_scale,
                enable_gqa=grouped,
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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x `[..., H]` / sqrt(mean(x^2) + eps) * weight `[H]`, of x's dtype; computed in float32."""
    found: torch.Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return found


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, wide = x.float(), weight.float()
        mean_square = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(rows.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(rows, scale).mul_(wide).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        rows, grad, scale = x.float().reshape(-1, width), grads[0].float().reshape(-1, width), scale.reshape(-1)
        product, wide = grad * rows, weight.float()
        along = torch.mv(product, wide).mul_(scale.pow(3)).div_(-width)
        grad_weight = torch.mv(product.t(), scale)
        grad_x = torch.mul(grad, wide, out=product).mul_(scale[:, None]).addcmul_(rows, along[:, None])
        return grad_x.view_as(x).to(x.dtype), grad_weight.to(weight.dtype), None
