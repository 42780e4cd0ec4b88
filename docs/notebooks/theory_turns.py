"""Credit by turn on enumerated trees of two turns: bias and variance of the ratios, and bias of the baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from theory_tables import TREES, TheoryTable
from theory_tree import BoolArray, FloatArray, Tree, relative_bias

WEIGHTS = {
    "token": "token",
    "prefix": "prefix: up to the token",
    "own-end": "up to the end of the token's turn",
    "turn-end": "turn-end: up to the end of the turn that earned",
    "sequence": "sequence",
}
"""Which ratio a turn's reward has at a token -> what the tables call it."""
BASELINES = {
    "none": "none",
    "returns": "of returns to go, 0 for those that had ended",
    "rewards": "of each turn's reward, over those that reached it",
}
"""Baselines in the limit of a large group -> what the tables call them."""


@dataclass(frozen=True)
class TwoTurns:
    """A tree whose sequences are two turns, the first of H // 2 tokens.

    rewards: what each turn earns, known at its end, `[N, 2]`. continues: whether there is a second turn, known at the
    end of the first, `[N]`. The second turn of a sequence without one has the reward 0 and is in no gradient.
    """

    tree: Tree
    rewards: FloatArray
    continues: BoolArray

    @classmethod
    def random(cls, rng: np.random.Generator, tree: Tree, *, mean: float = 0.0, may_end: bool = False) -> TwoTurns:
        """Rewards N(mean, 1) for each sequence of tokens up to the end of the turn.

        may_end: the token 0 at the end of the first turn ends the sequence.
        """
        first, tokens = tree.horizon // 2, tree.paths.tokens
        powers = tree.vocabulary ** np.arange(tree.horizon)
        prefixes = np.stack([tokens[:, :end] @ powers[:end] for end in (first, tree.horizon)], 1)
        drawn = mean + rng.standard_normal((2, tree.vocabulary**tree.horizon))
        continues = tokens[:, first - 1] != 0 if may_end else np.ones(len(tokens), np.bool_)
        rewards = np.stack([drawn[turn, prefixes[:, turn]] for turn in (0, 1)], 1)
        rewards[:, 1] *= continues
        return cls(tree, rewards, continues)

    @property
    def there(self) -> BoolArray:
        """Whether a sequence has the turn, `[N, 2]`."""
        return np.stack([np.ones_like(self.continues), self.continues], 1)

    @property
    def returns(self) -> FloatArray:
        """Returns to go, `[N, 2]`."""
        return _to_go(self.rewards)

    def of_tokens(self, values: FloatArray) -> FloatArray:
        """Values of turns `[N, 2]` -> of tokens `[N, H]`, 0 in a turn that is not there."""
        first = self.tree.horizon // 2
        return np.repeat(values * self.there, [first, self.tree.horizon - first], 1)

    def weighted(self, weight: str, *, to_go: bool) -> FloatArray:
        """What multiplies grad log target(a_t | s_t) in a sample of the behaviour policy, one of `WEIGHTS`: `[N, H]`.

        to_go: the rewards of the token's turn and the later one, else of its turn alone.
        """
        prefix = np.exp(self.tree.log_ratios("cumprod"))
        ends = prefix[:, [self.tree.horizon // 2 - 1, -1]]
        if weight == "turn-end":
            earned = self.rewards * ends
            return self.of_tokens(_to_go(earned) if to_go else earned)
        ratio = {
            "token": np.exp(self.tree.log_ratios("token")),
            "prefix": prefix,
            "own-end": self.of_tokens(ends),
            "sequence": np.exp(self.tree.log_ratios("sequence")),
        }[weight]
        return ratio * self.of_tokens(self.returns if to_go else self.rewards)

    def bias(self, weight: str, *, to_go: bool) -> float:
        """Relative bias of the expected gradient, against the same sum under the target policy."""
        true = self.tree.true_gradient(self.of_tokens(self.returns if to_go else self.rewards))
        return relative_bias(self.tree.sampled_gradient(self.weighted(weight, to_go=to_go)), true)

    def with_baseline(self, baseline: str) -> FloatArray:
        """Advantages of tokens, `[N, H]`, when samples are of the target policy: one of `BASELINES`."""
        probability = self.tree.target_probability
        of_those_there = probability @ self.rewards / (probability @ self.there)
        left = {
            "none": self.returns,
            "returns": self.returns - probability @ self.returns,
            "rewards": _to_go((self.rewards - of_those_there) * self.there),
        }
        return self.of_tokens(left[baseline])

    def bonus(self, advantages: FloatArray) -> float:
        """What a further turn seems to earn by the bias alone: its share of the gradient of P(a second turn)."""
        bias = self.tree.true_gradient(advantages) - self.tree.true_gradient(self.of_tokens(self.returns))
        further = self.tree.true_gradient(self.of_tokens(self.continues[:, None] * np.array([1.0, 0.0])))
        return float((bias * further).sum() / (further**2).sum())


def _to_go(rewards: FloatArray) -> FloatArray:
    return np.asarray(rewards[:, ::-1].cumsum(1)[:, ::-1])


def turn_tables(rng: np.random.Generator, vocabulary: int, horizon: int, shift: float) -> list[TheoryTable]:
    """Over `TREES` random trees: the ratios, and the baselines."""
    trees = [Tree.random(rng, vocabulary, horizon, shift) for _ in range(TREES)]
    return [
        _weights_table([TwoTurns.random(rng, tree) for tree in trees]),
        _baselines_table([TwoTurns.random(rng, tree, mean=1.0, may_end=True) for tree in trees]),
    ]


def _weights_table(tasks: list[TwoTurns]) -> TheoryTable:
    def medians(of: Mapping[str, list[float]]) -> list[float]:
        return [float(np.median(values)) for values in of.values()]

    own, to_go = (
        medians({weight: [task.bias(weight, to_go=choice) for task in tasks] for weight in WEIGHTS})
        for choice in (False, True)
    )
    variance = {
        weight: [task.tree.trace_variance(task.weighted(weight, to_go=True)) for task in tasks] for weight in WEIGHTS
    }
    return TheoryTable.of(
        "turn_credit",
        "Credit by turn: relative bias of the gradient, and its trace variance, by the ratio of a turn's reward",
        f"Two turns, each of which earns a reward at its end; medians over {len(tasks)} random trees. A turn's reward "
        "depends on all of its tokens, so the prefix up to the token is not enough. With the prefix up to the end of "
        "the turn that earned it each reward is exact, and so is the return to go. The sequence ratio is exact, too.",
        {
            "ratio of a turn's reward": list(WEIGHTS.values()),
            "bias, own turn": own,
            "bias, return to go": to_go,
            "variance, return to go": medians(variance),
        },
    )


def _baselines_table(tasks: list[TwoTurns]) -> TheoryTable:
    rows = []
    for baseline, name in BASELINES.items():
        found = [(task, task.with_baseline(baseline)) for task in tasks]
        figures = [
            (
                relative_bias(task.tree.true_gradient(a), task.tree.true_gradient(task.of_tokens(task.returns))),
                task.bonus(a),
                task.tree.trace_variance(a, of_target=True),
            )
            for task, a in found
        ]
        rows.append((name, *np.median(figures, 0).tolist()))
    return TheoryTable(
        "turn_baselines",
        "Credit by turn: baselines where a sequence may end after its first turn, samples of the policy itself",
        f"Each turn earns 1 on average; medians over {len(tasks)} random trees. A baseline of returns to go, in which "
        "those that had ended count 0, has no bias. Normalizing each turn's reward over those that reached it "
        "subtracts a term for every turn that there is: a hidden bonus for a further turn, minus what it earns.",
        ("baseline", "bias", "bonus of a further turn", "variance"),
        tuple(rows),
    )
