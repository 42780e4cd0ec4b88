"""Two binary actions and the reward a_1 a_2: why the prefix ratio is not unbiased for an outcome reward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ctpo_megatron.theory.tree import RATIOS, Tree

_FIRST, _SECOND = (0, 1), (2, 1)
"""Node and token of the logits: of a_1 = 1, and of a_2 = 1 after a_1 = 1."""


@dataclass(frozen=True)
class Counterexample:
    """p, q: probability of a_1 = 1, and of a_2 = 1, under the target policy; p_b, q_b: under the behaviour policy."""

    p: float = 0.6
    q: float = 0.8
    p_b: float = 0.5
    q_b: float = 0.4

    def formulas(self) -> dict[str, tuple[float, float]]:
        """Gradient of E[a_1 a_2] in the logits of a_1, and of a_2 after a_1 = 1: the true one, and CTPO's."""
        first, second = self.p * (1 - self.p), self.p * self.q * (1 - self.q)
        return {"true": (first * self.q, second), "cumprod": (first * self.q_b, second)}

    def enumerated(self) -> dict[str, tuple[float, float]]:
        """The same from all four sequences, and the other ratios."""
        tree = Tree.independent(_log_probs(self.p_b, self.q_b), _log_probs(self.p, self.q))
        reward = tree.paths.tokens.prod(1, keepdims=True) * np.ones(tree.horizon)
        found = {"true": tree.true_gradient(reward)}
        found |= {ratio: tree.expected_gradient(ratio, reward) for ratio in RATIOS}
        return {name: (float(gradient[_FIRST]), float(gradient[_SECOND])) for name, gradient in found.items()}


def _log_probs(*of_one: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array([[math.log1p(-each), math.log(each)] for each in of_one])
