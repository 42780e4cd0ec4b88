"""What enumeration of a tree says, as tables: bias and variance of the ratios, and the counterexample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from theory_tree import (
    RATIOS,
    Tree,
    chi_squared,
    equal_factors,
    independent_variances,
    sampled_variances,
    second_moments,
    suffix_share,
    variances,
)

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


TableCell = str | int | float
TREES = 200
"""Random trees over which the bias with one outcome reward is shown: one tree alone is an anecdote."""
EQUAL_CHI2 = (0.1, 0.01, 0.0001)


@dataclass(frozen=True)
class TheoryTable:
    """name: its key in theory.json. says: what it shows, and what it does not. rows: one cell for each of `columns`."""

    name: str
    title: str
    says: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]

    @classmethod
    def of(cls, name: str, title: str, says: str, columns: Mapping[str, Iterable[TableCell]]) -> TheoryTable:
        """From columns of equal length; numbers of numpy become plain ones."""
        plain = [np.asarray(column, object).tolist() for column in columns.values()]
        return cls(name, title, says, tuple(columns), tuple(zip(*plain, strict=True)))

    def column(self, name: str) -> list[TableCell]:
        """All cells of a column. Raises ValueError for an unknown name."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]


def bias_tables(tree: Tree, rng: np.random.Generator) -> list[TheoryTable]:
    """Bias of each term of the gradient, with an advantage of the prefix (proposition 1) and with an outcome reward."""
    positions = {"t": range(1, tree.horizon + 1)}
    prefix, outcome = tree.prefix_advantages(rng), tree.outcome_advantages(rng)
    return [
        TheoryTable.of(
            "bias",
            "Proposition 1: relative bias of the gradient's term t, advantage A(s_t, a_t)",
            "The prefix ratio up to t gives each term the target policy's distribution of prefixes, so its bias is "
            "rounding (below 1e-12). So is the sequence ratio's, which varies more. The token ratio is exact at the "
            "first token only. GSPO's is exact nowhere. All of this is for an advantage known with token t, and "
            "without a clip.",
            positions | {RATIOS[ratio]: tree.bias_by_position(ratio, prefix) for ratio in RATIOS},
        ),
        TheoryTable.of(
            "outcome_bias_by_position",
            "The same with one outcome reward for the whole sequence",
            "Now the prefix ratio is NOT unbiased: what follows token t still comes from the behaviour policy. Only "
            "its last term is exact, where the prefix is the whole sequence. The sequence ratio is exact "
            "everywhere.",
            positions | {RATIOS[ratio]: tree.bias_by_position(ratio, outcome) for ratio in RATIOS},
        ),
    ]


def outcome_table(tree: Tree, rng: np.random.Generator, shift: float) -> TheoryTable:
    """Bias of the whole gradient with one outcome reward, on this tree and on `TREES` others of its size."""
    others = [Tree.random(rng, tree.vocabulary, tree.horizon, shift) for _ in range(TREES)]
    trees = [(each, each.outcome_advantages(rng)) for each in (tree, *others)]
    bias = {ratio: np.array([each.bias(ratio, reward) for each, reward in trees]) for ratio in RATIOS}
    quantile = {ratio: np.quantile(found[1:], (0.1, 0.5, 0.9)) for ratio, found in bias.items()}
    less = {ratio: int((found[1:] < bias["token"][1:]).sum()) for ratio, found in bias.items()}
    return TheoryTable.of(
        "outcome_bias",
        "One outcome reward: relative bias of the whole gradient",
        f"With an outcome reward, as CTPO trains on, CTPO's gradient is biased: median {quantile['cumprod'][1]:.2f} "
        f"over {TREES} random trees. It is less biased than the token ratio's in {less['cumprod']} of them. That is "
        "an observation on small trees, and no theorem. The sequence ratio alone has no bias.",
        {
            "ratio": list(RATIOS.values()),
            "this tree": [float(found[0]) for found in bias.values()],
            **{
                name: [float(quantile[ratio][place]) for ratio in RATIOS]
                for place, name in enumerate(("10 %", "median", "90 %"))
            },
            "below token": [less[ratio] for ratio in RATIOS],
        },
    )


def variance_table(tree: Tree) -> TheoryTable:
    """Proposition 2 (i)."""
    prefix, sequence = variances(tree, "cumprod"), variances(tree, "sequence")
    return TheoryTable.of(
        "variance",
        "Proposition 2 (i): variance of the ratios at position t",
        "The sequence ratio varies at least as much as any prefix ratio. The difference is exactly the last column, "
        "the mean of rho_1:t^2 times the variance of the remaining factors given the prefix, and so never negative. "
        "It is zero only where these factors are constant, as at t = H.",
        {
            "t": range(1, tree.horizon + 1),
            "token": variances(tree, "token"),
            "prefix": prefix,
            "sequence": sequence,
            "sequence - prefix": sequence - prefix,
            "mean of the rest": suffix_share(tree),
        },
    )


def independent_table(tree: Tree, rng: np.random.Generator, samples: int) -> TheoryTable:
    """Proposition 2 (ii) of a tree whose positions are independent, by formula, by enumeration and from samples."""
    first = np.cumsum([0, *(tree.vocabulary**depth for depth in range(tree.horizon - 1))])
    chi2 = chi_squared(tree.behaviour[first], tree.target[first])
    sampled, error = sampled_variances(tree, tree.sample(rng, samples))
    return TheoryTable.of(
        "independent",
        "Proposition 2 (ii): independent factors, Var rho_1:t = prod(1 + chi2_k) - 1",
        f"Formula and enumeration agree to rounding. The variance of {samples:,} sampled sequences has the standard "
        "error in the last column. This form needs independent factors; proposition 2 (i) does not.",
        {
            "t": range(1, tree.horizon + 1),
            "chi2_t": chi2,
            "formula": independent_variances(chi2),
            "enumerated": variances(tree, "cumprod"),
            "sampled": sampled,
            "standard error": error,
        },
    )


def equal_table(vocabulary: int, horizon: int) -> TheoryTable:
    """Proposition 2 (ii) with the same chi^2 at all positions, down to small ones."""
    chosen = sorted({1, max(1, horizon // 2), horizon - 1})
    rows: list[tuple[TableCell, ...]] = []
    for chi2 in EQUAL_CHI2:
        tree = equal_factors(vocabulary, horizon, chi2)
        moment, variance = second_moments(tree, "cumprod"), variances(tree, "cumprod")
        for t in chosen:
            ratios = [float(found[-1] / found[t - 1]) for found in (moment, variance)]
            rows.append((chi2, t, (1 + chi2) ** (horizon - t), *ratios, horizon / t))
    return TheoryTable(
        "equal_factors",
        "Equal chi2 = c at all positions: sequence ratio over prefix ratio",
        "Second moments differ by (1 + c)^(H - t), exactly. The variances differ by H / t only in the limit c -> 0.",
        ("c", "t", "(1 + c)^(H - t)", "second moments", "variances", "H / t"),
        tuple(rows),
    )


def counterexample_table(example: Counterexample) -> TheoryTable:
    """Two binary actions and the reward a_1 a_2."""
    formulas, found = example.formulas(), example.enumerated()
    return TheoryTable.of(
        "counterexample",
        "Counterexample: two binary actions, reward a_1 a_2, gradient in the two logits",
        f"Target policy p = {example.p:g}, q = {example.q:g}; behaviour policy p_b = {example.p_b:g}, q_b = "
        f"{example.q_b:g}. The first logit's true gradient is p(1-p)q. CTPO's is p(1-p)q_b, as the second action is "
        "the behaviour policy's. Its second term is exact. The sequence ratio is exact in both.",
        {
            "ratio": ["true", *RATIOS.values()],
            "first logit": [found[name][0] for name in ("true", *RATIOS)],
            "by formula": [formulas[name][0] if name in formulas else "" for name in ("true", *RATIOS)],
            "second logit": [found[name][1] for name in ("true", *RATIOS)],
        },
    )
