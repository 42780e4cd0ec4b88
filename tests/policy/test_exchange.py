"""Trajectories that only rank zero has reach every rank as the typed arrays that it trains on, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.data import TokenSequence, Trajectory, token_sequences
from ctpo_megatron.data.tokens import common_type, joined
from ctpo_megatron.policy import destroy_distributed, init_distributed
from ctpo_megatron.policy.minibatch import share_outline, share_tokens
from tests.policy import models
from tests.support import ranks

ADVANTAGES = [0.1 * n - 0.7 for n in range(16)]
SHARES = [[0, 3, 5, 7, 11], [1, 2, 4, 6, 8, 9, 10, 12, 13, 14, 15]]


def trajectories() -> list[Trajectory]:
    """Of 16, one with a response token that is not in the loss, and one with a further column."""
    result: list[Trajectory] = models.trajectories()
    first = result[4].response_mask.index(1)
    result[4].tokens["loss_mask"][first] = 0
    result[5].tokens["weight_version"][result[5].response_mask.index(1)] = 1
    result[6].append_model([3], [-0.5], [0], 9, {"experts": np.array([[[1, 2], [3, 255]]], np.uint8)})
    return result


def plain(sequence: TokenSequence) -> tuple[Any, Any]:
    """Type and tokens, with the columns that only some have: 0 where a trajectory has none."""
    kind = common_type(each.kind for each in token_sequences(trajectories(), version=0))
    tokens = joined([sequence.records], kind)
    return tokens.dtype.descr, [[np.asarray(value).tolist() for value in token.tolist()] for token in tokens]


def exchange(tensor_parallel: int) -> dict[str, Any]:
    """What this rank has after the exchange; rank zero alone has the trajectories before."""
    layout = init_distributed(PolicyConfig(tensor_model_parallel_size=tensor_parallel), seed=0)
    own = token_sequences(trajectories(), version=0) if layout.is_rank_zero else []
    sequences, advantages, _ = share_outline(lambda: own, ADVANTAGES, layout, ordered=False)
    shares = SHARES if layout.dp_size == 2 else [SHARES[0] + SHARES[1]]
    share = share_tokens(sequences, shares, layout)
    destroy_distributed()
    counts = [(s.place, s.length, s.sampled_tokens, s.loss_tokens) for s in sequences]
    columns = {s.place: plain(s) for s in share}
    known = [s.place for s in sequences if s.tokens is not None]
    return {"dp_rank": layout.dp_rank, "counts": counts, "advantages": advantages, "tokens": columns, "known": known}


def expected(places: list[int]) -> dict[int, Any]:
    chosen = [s for s in token_sequences(trajectories(), version=0) if s.place in places]
    return {s.place: plain(s) for s in chosen}


@pytest.mark.parametrize(
    ("count", "tensor_parallel", "shares"),
    [(2, 1, SHARES), (2, 2, [SHARES[0] + SHARES[1]]), (1, 1, [[*range(16)]])],
    ids=["two replicas", "two ranks of a replica", "one rank"],
)
def test_each_rank_gets_the_share_of_its_replica(count: int, tensor_parallel: int, shares: list[list[int]]) -> None:
    whole = token_sequences(trajectories(), version=0)
    for rank, answer in enumerate(ranks.run(exchange, tensor_parallel, ranks=count)):
        assert answer["counts"] == [(s.place, s.length, s.sampled_tokens, s.loss_tokens) for s in whole]
        assert answer["advantages"] == ADVANTAGES  # float64: the same bits
        assert answer["tokens"] == expected(shares[answer["dp_rank"]])
        assert rank == 0 or answer["known"] == []  # sizes travel to all, tokens to those that train on them
        kinds = {kind[1:] for descr, _ in answer["tokens"].values() for _, kind, *_ in descr}
        assert kinds == {"i4", "f4", "b1", "u1"}
