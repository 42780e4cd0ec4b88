"""Packing loses nothing and depends on nothing but its input; packed attention equals attention per sequence."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.data import (
    PackingRules,
    PrefixOrder,
    TokenSequence,
    Trajectory,
    micro_batch_count,
    pack,
    split_evenly,
    token_sequences,
)
from ctpo_megatron.models import FAMILIES, ModelSpec
from ctpo_megatron.policy import Layout, context, device, layers
from ctpo_megatron.policy.attention_plan import (
    EXACT,
    SHORTEST_OF_CLASS,
    STEP,
    AttentionPlan,
    AttentionRules,
    attention_calls,
    attention_shapes,
    call_lengths,
)
from ctpo_megatron.policy.context import ContextSplit
from ctpo_megatron.policy.layers import PackedCausalAttention
from ctpo_megatron.policy.minibatch import packing_rules
from tests.policy import models
from tests.policy.jobs import CP2, SP2, VPP2

EVERY_RULE = pytest.mark.parametrize(
    "rules", [AttentionRules(), AttentionRules(bounded=True), AttentionRules(True, True)], ids=str
)


def of_lengths(lengths: list[int]) -> list[TokenSequence]:
    result = []
    for index, length in enumerate(lengths):
        trajectory = Trajectory(f"p{index}", 0, seed=0)
        trajectory.append_context([index], turn=0)
        trajectory.append_model(list(range(1, length)), [-0.5] * (length - 1), [3] * (length - 1), turn=1)
        result.append(trajectory)
    return token_sequences(result)


@settings(max_examples=60)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=20),
    st.integers(56, 90),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_every_token_is_packed_once_within_the_rules(
    lengths: list[int], budget: int, piece: int, multiple: int, rounds: int, at_least: int
) -> None:
    trajectories = of_lengths(lengths)
    rules = PackingRules(budget, sequence_multiple=piece, batch_multiple=multiple, count_multiple=rounds)
    batches = pack(trajectories, [float(i) for i in range(len(lengths))], rules, at_least=at_least)
    assert len(batches) >= max(at_least, micro_batch_count(trajectories, rules)) and len(batches) % rounds == 0
    seen = []
    for batch in batches:
        assert batch.num_tokens % multiple == 0 and batch.num_tokens > 0
        bounds = batch.cu_seqlens
        assert bounds[0] == 0 and bounds[-1] == batch.num_tokens
        assert not (bounds.diff() % piece).any() and (bounds.diff() > 0).all()
        real = torch.zeros(batch.num_tokens, dtype=torch.bool)
        for number, (index, place) in enumerate(batch.places()):
            original = trajectories[index].tokens
            assert original is not None
            assert place.start == bounds[number] and place.stop <= bounds[number + 1]
            assert batch.token_ids[place].tolist() == original["token_ids"].tolist()
            assert batch.position_ids[place].tolist() == list(range(lengths[index]))
            assert batch.response_mask[place].tolist() == original["response_mask"].tolist()
            assert set(batch.advantages[place].tolist()) == {float(index)}
            real[place] = True
            seen.append(index)
        for masked in (batch.response_mask, batch.loss_mask, batch.rollout_log_probs):
            assert not masked[~real].any()
        assert sum(rules.padded(length) for length in batch.lengths) <= budget
    assert sorted(seen) == list(range(len(lengths)))


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), min_size=1, max_size=20),
    st.integers(12, 40),
    st.sampled_from([0.0, 0.2, 0.9]),
)
def test_tokens_of_one_row_take_their_share_of_a_micro_batch(
    answers: list[list[int]], budget: int, repeated: float
) -> None:
    sequences = []
    for index, answer in enumerate(answers):
        trajectory = Trajectory(f"p{index}", 0, seed=0)
        trajectory.append_context(answer[:1], turn=0)
        trajectory.append_model(answer[1:], [-0.5] * len(answer[1:]), [0] * len(answer[1:]), turn=1)
        sequences.append(trajectory)
    tokens = token_sequences(sequences)
    order = PrefixOrder.of([each.records["token_ids"] for each in tokens])
    rules = PackingRules(budget, repeated_token=repeated)
    batches = pack(tokens, None, rules, order=order)
    assert sorted(place for batch in batches for place in batch.sequences) == [*range(len(answers))]
    for batch in batches:
        rows = len(
            {tuple(answer[:end]) for answer in map(answers.__getitem__, batch.sequences) for end in range(1, 13)}
        )
        assert rows + repeated * (batch.num_tokens - rows) <= budget


def test_more_micro_batches_come_from_halving_the_largest() -> None:
    batches = pack(of_lengths([8] * 8), None, PackingRules(64), at_least=3)
    assert sorted(len(batch.sequences) for batch in batches) == [2, 2, 4]


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


@given(st.lists(st.integers(2, 40), min_size=4, max_size=20), st.integers(1, 4), st.booleans())
def test_replicas_share_all_trajectories_evenly(lengths: list[int], parts: int, squared: bool) -> None:
    costs = [float(n * n) if squared else float(n) for n in lengths]
    shares = split_evenly(of_lengths(lengths), parts, costs if squared else None)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(shares)
    loads = [sum(costs[i] for i in share) for share in shares]
    # Whatever a rank has beyond the average came last, as the smallest of its share: Graham's argument.
    assert all(
        load <= sum(costs) / parts + min(costs[i] for i in share) for load, share in zip(loads, shares, strict=True)
    )


def test_a_long_sequence_weighs_more_than_its_tokens() -> None:
    spec = ModelSpec(FAMILIES["Qwen3ForCausalLM"], 1, 8, 1, 1, 8, 8, 4096, 32)
    trajectories = of_lengths([4000, *[1000] * 4])
    by_cost = split_evenly(trajectories, 2, [spec.forward_flops(s.length, s.sampled_tokens) for s in trajectories])
    assert by_cost == [[0], [1, 2, 3, 4]]
    six = of_lengths([4000, *[1000] * 6])
    assert split_evenly(six, 2)[0] != [0]  # 5000 tokens each
    assert split_evenly(six, 2, [spec.forward_flops(s.length, s.sampled_tokens) for s in six])[0] == [0]


def test_trajectories_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"holds 10 \(policy\.micro_batch_tokens.*rollout\.max_response_tokens"):
        pack(of_lengths([11]), None, PackingRules(10))
    with pytest.raises(ValueError, match="has 10 tokens, but a micro-batch holds 10"):
        pack(of_lengths([10]), None, PackingRules(10, sequence_multiple=4))
    trajectory = Trajectory("p", 0, seed=0)
    trajectory.append_model([1, 2], [-1.0, -1.0], [0, 0], turn=1)
    with pytest.raises(ValueError, match="needs a prompt"):
        token_sequences([trajectory])


@EVERY_RULE
@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [1, 2, 3, 4, 31, 32, 33, 7], [64, 1, 1], [65, 0, 63, 128, 129]])
def test_packed_attention_equals_attention_per_sequence(
    lengths: list[int], rules: AttentionRules, layout: Layout
) -> None:
    torch.manual_seed(0)
    tokens, heads, groups, width = sum(lengths), 4, 2, 8
    query = torch.randn(tokens, heads, width, requires_grad=True)
    key, value = (torch.randn(tokens, groups, width, requires_grad=True) for _ in range(2))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens)
    packed.split = ContextSplit.of(cu_seqlens)
    packed.attention_plan = AttentionPlan(packed.split, rules)
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


@EVERY_RULE
def test_attention_of_context_parallel_ranks_is_that_of_one(
    rules: AttentionRules, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks in this process; what they gather is put together by hand."""
    torch.manual_seed(0)
    lengths, heads, groups, width = [8, 64, 12, 68, 4, 132], 4, 2, 8
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    query = torch.randn(sum(lengths), heads, width)
    key, value = (torch.randn(sum(lengths), groups, width) for _ in range(2))
    attention = PackedCausalAttention(SimpleNamespace())

    def attend(split: ContextSplit) -> torch.Tensor:
        packed = PackedSeqParams(qkv_format="thd")
        packed.split, packed.attention_plan = split, AttentionPlan(split, rules)
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
    shapes = attention_shapes(batch.cu_seqlens, EXACT)
    assert attention_shapes(batch.cu_seqlens, None) == [(1, batch.num_tokens)]  # of layers that pad nothing
    assert len(plan.queries) == len(plan.tokens) == rows == sum(size * length for size, length in shapes)
    assert batch.num_tokens >= SHORTEST_OF_CLASS * rows


BUDGET, MOST_SHAPES = 24576, 317
"""Tokens of a micro-batch, and shapes that its calls of attention can have; docs/policy.md says so, too."""


def test_all_shapes_of_a_budget_are_few() -> None:
    """Every length as often as it fits, and fewer times: no other set of sequences has another shape."""
    shapes = set()
    for length in range(1, BUDGET + 1):
        for rows in (1 << k for k in range((BUDGET // length).bit_length())):
            shapes |= {(len(call.members), call.length) for call in attention_calls([length] * rows, bounded=True)}
    assert len(shapes) == MOST_SHAPES


@settings(max_examples=60)
@given(st.lists(st.integers(0, 6000), max_size=200))
def test_few_shapes_hold_any_sequences(lengths: list[int]) -> None:
    lengths = [n for end, n in zip(itertools.accumulate(lengths), lengths, strict=True) if end <= BUDGET]
    calls = attention_calls(lengths, bounded=True)
    assert sorted(index for call in calls for index in call.members) == [i for i, n in enumerate(lengths) if n]
    for call in calls:
        shortest, longest = (bound(lengths[index] for index in call.members) for bound in (min, max))
        assert call.length in call_lengths(BUDGET) and longest <= call.length
        assert call.length - shortest < STEP or shortest > SHORTEST_OF_CLASS * call.length - STEP
        assert len(call.members) & (len(call.members) - 1) == 0
    batch = torch.tensor([0, *itertools.accumulate(lengths)])
    assert len(set(attention_shapes(batch, AttentionRules(bounded=True)))) <= MOST_SHAPES


@pytest.mark.parametrize(
    ("dtype", "head_dim", "masked", "capability", "rules"),
    [
        (torch.bfloat16, 128, False, (9, 0), EXACT),
        (torch.float16, 64, False, (8, 0), EXACT),
        (torch.bfloat16, 320, False, (9, 0), AttentionRules(bounded=True)),  # wider than flash attention takes
        (torch.bfloat16, 128, True, (9, 0), AttentionRules(bounded=True)),  # cuDNN
        (torch.bfloat16, 128, True, (8, 0), AttentionRules(bounded=True, repeat_keys=True)),
        (torch.float32, 128, False, (9, 0), AttentionRules(bounded=True, repeat_keys=True)),
    ],
)
def test_attention_is_called_as_its_fused_back_ends_take_it(
    dtype: torch.dtype, head_dim: int, masked: bool, capability: tuple[int, int], rules: AttentionRules, monkeypatch
) -> None:
    assert device.attention_rules(dtype, head_dim, masked=masked) == EXACT  # a CPU
    monkeypatch.setattr(device, "CUDA", True)
    monkeypatch.setattr(device, "_compute_capability", lambda: capability)
    assert device.attention_rules(dtype, head_dim, masked=masked) == rules
