"""Credit by turn in Python floats, written from the formulas: advantages of turns, and the loss at their ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ctpo_megatron.objective import PolicyObjective
from tests.objective.objective_reference import (
    Expected,
    Sequence,
    Token,
    clipped,
    differences,
    packed,
    random_batch,
    share_of,
)


@dataclass
class Turns:
    """A sequence, and the turn of each of its tokens."""

    sequence: Sequence
    turn: list[int]


def random_turns(seed: int, lengths: list[int], spread: float) -> list[Turns]:
    """Sequences of turns of random length, each with an advantage of its own; some turns have no model token."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for sequence in random_batch(seed, lengths, spread):
        n = len(sequence)
        turn = (torch.rand(n, generator=draw) < 0.3).cumsum(0).tolist()
        of_turn = torch.randn(n + 1, generator=draw, dtype=torch.float64).tolist()
        sequence.advantage = [of_turn[k] for k in turn]
        found.append(Turns(sequence, turn))
    return found


def packed_turns(batch: list[Turns], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Keyword arguments of `policy_loss`."""
    turn = torch.tensor([k for each in batch for k in each.turn], dtype=torch.int16)
    return {**packed([each.sequence for each in batch], dtype), "turn": turn}


def turn_end_reference(batch: list[Turns], o: PolicyObjective) -> Expected:
    """Loss, token losses and gradient: for each turn that ends at a token or after it, one term with the gain of it."""
    out = Expected()
    for each in batch:
        s, d = each.sequence, differences(each.sequence)
        ends = sorted({k: i for i, k in enumerate(each.turn) if s.model[i]}.values())
        terms = {}
        for place, end in enumerate(ends):
            rest = s.advantage[ends[place + 1]] if place + 1 < len(ends) else 0.0
            raw = math.fsum(d[: end + 1])
            token = Token(end, s.advantage[end] - rest, sum(s.model[: end + 1]), raw, math.exp(min(raw, 10.0)))
            terms[end] = clipped(token, s, d, o)
        share = share_of(s, [other.sequence for other in batch], o)
        losses, slopes = [0.0] * len(s), [0.0] * len(s)
        for i in range(len(s)):
            if s.loss[i]:
                later = [terms[end] for end in ends if end >= i]
                losses[i] = s.weight[i] * math.fsum(value for value, _, _ in later)
                slopes[i] = s.weight[i] * math.fsum(slope for _, slope, _ in later) * share
                own = later[0][2]
                out.high, out.low, out.dual = out.high + own[0], out.low + own[1], out.dual + own[2]
        out.loss += math.fsum(losses) * share
        out.per_token.append(losses)
        out.gradient.append(slopes)
    return out


def turn_advantages(returns: list[list[float]], kind: str, normalize: bool) -> list[list[float]]:
    """Of one group, one list a trajectory; the turns that a trajectory lacks count 0."""
    n, turns = len(returns), max(map(len, returns))
    columns = [[r[k] if k < len(r) else 0.0 for r in returns] for k in range(turns)]
    spread = [math.sqrt(sum((x - sum(c) / n) ** 2 for x in c) / (n - 1)) for c in columns]
    scale = max(spread) + 1e-6 if kind == "group" and normalize else 1.0

    def one(i: int, k: int) -> float:
        others = [x for j, x in enumerate(columns[k]) if j != i]
        return (columns[k][i] - sum(others) / len(others)) * (1.0 if kind == "rloo" else (n - 1) / n) / scale

    return [[one(i, k) for k in range(len(r))] for i, r in enumerate(returns)]
