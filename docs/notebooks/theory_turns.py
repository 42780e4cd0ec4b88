"""Credit by turn on enumerated trees of two turns: bias and variance of the ratios, and bias of the baselines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
        """Return the factor of grad log target(a_t | s_t) in a sample of the behaviour policy, `[N, H]`.

        weight: one of `WEIGHTS`.


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
        """Return what a further turn seems to earn by the bias alone: its share of the gradient of P(a second turn)."""
        bias = self.tree.true_gradient(advantages) - self.tree.true_gradient(self.of_tokens(self.returns))
        further = self.tree.true_gradient(self.of_tokens(self.continues[:, None] * np.array([1.0, 0.0])))
        return float((bias * further).sum() / (further**2).sum())


def _to_go(rewards: FloatArray) -> FloatArray:
    return np.asarray(rewards[:, ::-1].cumsum(1)[:, ::-1])
