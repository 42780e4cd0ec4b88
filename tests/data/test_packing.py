"""Packing loses nothing and depends on nothing but its input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
