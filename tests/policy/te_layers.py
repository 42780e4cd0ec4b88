"""Stand-ins for Transformer Engine's attention and rotation, which need a GPU, in a model of local layers.

They see what Transformer Engine's would see: rows of whole packed sequences, and where these begin. Their arithmetic is
torch's and megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from ctpo_megatron.policy import layers, model, replacements
from ctpo_megatron.policy.attention_plan import AttentionPlan
from ctpo_megatron.policy.context import ContextSplit
from ctpo_megatron.policy.layers import PackedCausalAttention

SetAttribute = Callable[[Any, str, Any], None]


class SequenceAttention(PackedCausalAttention):
    """Attention over the sequences that `cu_seqlens_q` bounds, whatever else the record of the micro-batch holds."""

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
        assert packed_seq_params is not None
        # Transformer Engine's kernels read it on the device: nothing waits for that.
        bounds = packed_seq_params.cu_seqlens_q.detach().to("cpu", non_blocking=True)
        assert {query.shape[0], key.shape[0], value.shape[0]} == {int(bounds[-1])}, "rows of other sequences"
        assert int(bounds.diff().max()) == packed_seq_params.max_seqlen_q
        nothing = bounds.new_empty(0, dtype=torch.int64)
        split = ContextSplit(None, nothing, nothing, bounds).to(query.device)
        own = PackedSeqParams(qkv_format="thd")
        own.attention_plan = AttentionPlan(split)
        own.split = split
        return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, own)


def rotate_sequences(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,  # of megatron-core 0.19
) -> torch.Tensor:
    """Rotate packed rows `[N, h, d]` by their places in the sequences."""
    assert (cp_size, cp_rank, interleaved) == (1, 0, False)
    lengths = cu_seqlens.diff().long()
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths, output_size=t.shape[0])
    places = torch.arange(t.shape[0], device=t.device) - starts
    return rotate_sequence(t[:, None], freqs.index_select(0, places))[:, 0]


def rotate_sequence(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate rows `[n, 1, h, d]` by the angles `[n, 1, 1, d]`."""
    assert t.ndim == 4 and freqs.shape == (t.shape[0], 1, 1, t.shape[-1])
    return rope_utils._apply_rotary_pos_emb_bshd(t, freqs)


def install(set_attribute: SetAttribute = setattr) -> None:
    """Let models be built of these layers where `policy.layer_spec` may be Transformer Engine's."""
    local, routing = layers.local_block_spec, model._routing

    def block_spec(config: TransformerConfig, use_transformer_engine: bool, vp_stage: int | None = None) -> Any:
        assert use_transformer_engine
        spec = local(config, vp_stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = SequenceAttention
        return spec

    rotation: Any = rotate_sequences
    if replacements._installed:
        rotation = layers.rotate_rows(rotate_sequences, rotate_sequence)
    set_attribute(rope_utils, "fused_apply_rotary_pos_emb_thd", rotation)
    set_attribute(rope_utils, "fused_apply_rotary_pos_emb", rotate_sequence)
    set_attribute(model, "get_gpt_decoder_block_spec", block_spec)
    set_attribute(model, "_routing", lambda use_te, *, replay: routing(False, replay=replay))
    set_attribute(model, "resolve_layer_spec", lambda policy: "transformer_engine")
