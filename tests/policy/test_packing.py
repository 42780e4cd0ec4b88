"""Packing loses nothing and depends on nothing but its input; packed attention equals attention per sequence."""

from __future__ import annotations

from types import SimpleNamespace

import models
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams

from ctpo_megatron.data import Trajectory, pack, split_evenly
from ctpo_megatron.policy.layers import LengthClasses, PackedCausalAttention


def of_lengths(lengths: list[int]) -> list[Trajectory]:
    result = []
    for index, length in enumerate(lengths):
        trajectory = Trajectory(f"p{index}", 0, seed=0)
        trajectory.append_context([index], turn=0)
        trajectory.append_model(list(range(1, length)), [-0.5] * (length - 1), [3] * (length - 1), turn=1)
        result.append(trajectory)
    return result


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=20), st.integers(40, 90), st.integers(1, 4))
def test_every_token_is_packed_once_within_the_budget(lengths: list[int], budget: int, multiple: int) -> None:
    trajectories = of_lengths(lengths)
    batches = pack(trajectories, [float(i) for i in range(len(lengths))], max_tokens=budget, multiple_of=multiple)
    seen = []
    for batch in batches:
        assert batch.num_tokens % multiple == 0
        bounds = batch.cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == batch.num_tokens
        for key, start, end in zip(batch.sequences, bounds, bounds[1:], strict=False):
            index = int(key[0][1:])
            original = trajectories[index]
            assert batch.token_ids[start:end].tolist() == original.token_ids
            assert batch.position_ids[start:end].tolist() == list(range(end - start))
            assert batch.model_mask[start:end].tolist() == [bool(m) for m in original.model_mask]
            assert set(batch.advantages[start:end].tolist()) == {float(index)}
            seen.append(index)
        assert sum(len(trajectories[int(key[0][1:])]) for key in batch.sequences) <= budget
    assert sorted(seen) == list(range(len(lengths)))


@given(st.lists(st.integers(2, 40), min_size=4, max_size=20), st.integers(1, 4))
def test_replicas_share_all_trajectories(lengths: list[int], parts: int) -> None:
    shares = split_evenly(of_lengths(lengths), parts)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert max(len(share) for share in shares) - min(len(share) for share in shares) <= 2
    assert all(shares)


def test_a_trajectory_beyond_the_budget_names_the_keys() -> None:
    with pytest.raises(ValueError, match=r"policy\.micro_batch_tokens is 10.*rollout\.max_response_tokens"):
        pack(of_lengths([11]), None, max_tokens=10)


def test_a_trajectory_without_prompt_is_refused() -> None:
    trajectory = Trajectory("p", 0, seed=0)
    trajectory.append_model([1, 2], [-1.0, -1.0], [0, 0], turn=1)
    with pytest.raises(ValueError, match="needs a prompt"):
        pack([trajectory], None, max_tokens=10)


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [1, 2, 3, 4, 31, 32, 33, 7], [64, 1, 1]])
def test_packed_attention_equals_attention_per_sequence(lengths: list[int]) -> None:
    torch.manual_seed(0)
    tokens, heads, groups, width = sum(lengths), 4, 2, 8
    query = torch.randn(tokens, heads, width, requires_grad=True)
    key, value = (torch.randn(tokens, groups, width, requires_grad=True) for _ in range(2))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens)
    attention = PackedCausalAttention(SimpleNamespace(), 1, None, "self")
    found = attention(query, key, value, None, packed_seq_params=packed)

    pieces = []
    for q, k, v in zip(*(t.split(lengths) for t in (query, key, value)), strict=True):
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


def test_length_classes_waste_less_than_half() -> None:
    batch = pack(models.trajectories(), None, max_tokens=4096)[0]
    classes = LengthClasses(batch.cu_seqlens).classes
    assert sum(real.numel() for _, real in classes) == batch.num_tokens
    assert all(real.numel() > index.numel() / 2 for index, real in classes)
