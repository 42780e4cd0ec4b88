"""Packed attention equals attention per sequence, micro-batches have what the layout needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.data import (
    PackingRules,
    pack,
    token_sequences,
)
from ctpo_megatron.policy import Layout, context, layers
from ctpo_megatron.policy.attention_plan import (
    SHORTEST_OF_CLASS,
    AttentionPlan,
    attention_calls,
)
from ctpo_megatron.policy.context import ContextSplit
from ctpo_megatron.policy.layers import PackedCausalAttention
from ctpo_megatron.policy.minibatch import packing_rules
from tests.policy import models
from tests.policy.jobs import CP2, SP2, VPP2

EITHER = pytest.mark.parametrize("grouped", [True, False])
"""Whether keys are repeated for all heads of queries."""


@pytest.mark.parametrize(
    ("policy", "rules"),
    [
        ({}, PackingRules(100)),
        (CP2, PackingRules(200, sequence_multiple=4)),
        (SP2 | {"context_parallel_size": 4}, PackingRules(400, sequence_multiple=8, batch_multiple=8)),
        (VPP2 | {"pipeline_model_parallel_size": 4}, PackingRules(100, count_multiple=4)),
    ],
)
def test_rules_follow_from_the_layout(policy: dict[str, Any], rules: PackingRules) -> None:
    assert packing_rules(PolicyConfig(micro_batch_tokens=100, **policy)) == rules


@EITHER
@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [1, 2, 3, 4, 31, 32, 33, 7], [64, 1, 1], [65, 0, 63, 128, 129]])
def test_packed_attention_equals_attention_per_sequence(
    lengths: list[int], grouped: bool, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_takes_grouped_keys", lambda *_: grouped)
    torch.manual_seed(0)
    tokens, heads, groups, width = sum(lengths), 4, 2, 8
    query = torch.randn(tokens, heads, width, requires_grad=True)
    key, value = (torch.randn(tokens, groups, width, requires_grad=True) for _ in range(2))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens)
    packed.split = ContextSplit.of(cu_seqlens)
    packed.attention_plan = AttentionPlan(packed.split)
    attention = PackedCausalAttention(SimpleNamespace())
    found = attention(query, key, value, None, packed_seq_params=packed)

    pieces = []
    for q, k, v in zip(*(t.split(lengths) for t in (query, key, value)), strict=True):
        if not len(q):
            continue
        out = F.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
        )
        pieces.append(out[0].transpose(0, 1).flatten(1))
    expected = torch.cat(pieces)
    torch.testing.assert_close(found.squeeze(1), expected)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((found.squeeze(1) * weight).sum(), (query, key, value))
    theirs = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@EITHER
def test_attention_of_context_parallel_ranks_is_that_of_one(
    grouped: bool, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks in this process; what they gather is put together by hand."""
    monkeypatch.setattr(layers, "_takes_grouped_keys", lambda *_: grouped)
    torch.manual_seed(0)
    lengths, heads, groups, width = [8, 64, 12, 68, 4, 132], 4, 2, 8
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    query = torch.randn(sum(lengths), heads, width)
    key, value = (torch.randn(sum(lengths), groups, width) for _ in range(2))
    attention = PackedCausalAttention(SimpleNamespace())

    def attend(split: ContextSplit) -> torch.Tensor:
        packed = PackedSeqParams(qkv_format="thd")
        packed.split, packed.attention_plan = split, AttentionPlan(split)
        mine = [split.take(t) for t in (query, key, value)]
        return attention(*mine, None, packed_seq_params=packed).squeeze(1)

    whole, splits = attend(ContextSplit.of(cu_seqlens)), []
    for rank in range(2):
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        monkeypatch.setattr(context.mpu, "get_context_parallel_group", lambda group=group: group)
        splits.append(ContextSplit.of(cu_seqlens))
    both = torch.cat([torch.cat([key, value], dim=-1)[split.rows] for split in splits])
    monkeypatch.setattr(layers, "gather_from_sequence_parallel_region", lambda own, group: both)
    for split in splits:
        torch.testing.assert_close(attend(split), whole[split.rows])


def test_length_classes_hold_every_token_once_and_little_else(layout: Layout) -> None:
    batch = pack(token_sequences(models.trajectories()), None, PackingRules(4096))[0]
    plan = AttentionPlan(ContextSplit.of(batch.cu_seqlens))
    assert plan.queries[plan.back].tolist() == list(range(batch.num_tokens))
    rows = sum(part.queries.numel() for part in plan.classes)
    calls = attention_calls(batch.cu_seqlens.diff().tolist())
    assert len(plan.queries) == len(plan.tokens) == rows == sum(len(call.members) * call.length for call in calls)
    assert batch.num_tokens >= SHORTEST_OF_CLASS * rows


class OnCuda:
    """Queries `[rows, heads, length, head_dim]` as far as the choice of a back end looks at them."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        self.dtype, self.shape = dtype, (1, 4, 8, head_dim)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "masked", "grouped"),
    [
        (torch.bfloat16, 128, False, True),
        (torch.bfloat16, 320, False, False),  # wider than flash attention takes
        (torch.bfloat16, 128, True, False),
        (torch.float32, 128, False, False),
    ],
)
def test_attention_is_called_as_its_fused_back_ends_take_it(
    dtype: torch.dtype, head_dim: int, masked: bool, grouped: bool
) -> None:
    query: Any = OnCuda(dtype, head_dim)
    mask = torch.zeros(()) if masked else None
    assert layers._takes_grouped_keys(query, mask) == grouped
    assert layers._takes_grouped_keys(torch.zeros(1, 4, 8, head_dim, dtype=dtype), mask)  # a CPU
