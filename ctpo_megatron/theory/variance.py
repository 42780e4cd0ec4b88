"""Variance of importance ratios (proposition 2 of the paper): exact on a tree, by formula, and from samples."""

from __future__ import annotations

import numpy as np

from ctpo_megatron.theory.tree import FloatArray, Paths, Tree


def variances(tree: Tree, ratio: str) -> FloatArray:
    """Var r_t of a `ratio_mode` under the behaviour policy, exact, `[H]`."""
    r = np.exp(tree.log_ratios(ratio))
    mean = tree.probability @ r
    return np.asarray(tree.probability @ (r - mean) ** 2)


def second_moments(tree: Tree, ratio: str) -> FloatArray:
    """E r_t^2 under the behaviour policy, exact, `[H]`."""
    return np.asarray(tree.probability @ np.exp(2 * tree.log_ratios(ratio)))


def suffix_share(tree: Tree) -> FloatArray:
    """E[rho_{1:t}^2 Var(rho_{t+1:H} | s_{t+1})], `[H]`.

    Var(rho_{1:H}) - Var(rho_{1:t}) is exactly this, and so never negative: proposition 2 (i). The conditional second
    moments come from the leaves up, M(s) = sum_a target(a | s)^2 / behaviour(a | s) M(s, a), and not from sequences.
    """
    moment = np.ones(len(tree.behaviour) + tree.vocabulary**tree.horizon)
    weight = np.exp(2 * tree.target - tree.behaviour)
    for node in reversed(range(len(tree.behaviour))):
        child = tree.vocabulary * node + 1
        moment[node] = weight[node] @ moment[child : child + tree.vocabulary]
    after = tree.vocabulary * tree.paths.nodes + 1 + tree.paths.tokens
    return np.asarray(tree.probability @ (np.exp(2 * tree.log_ratios("cumprod")) * (moment[after] - 1)))


def chi_squared(behaviour: FloatArray, target: FloatArray) -> FloatArray:
    """chi^2 of the target against the behaviour policy, from log-probabilities `[..., V]`: the variance of a factor."""
    return np.asarray(np.exp(2 * target - behaviour).sum(-1) - 1)


def independent_variances(chi2: FloatArray) -> FloatArray:
    """Var rho_{1:t} = prod_{k <= t} (1 + chi2_k) - 1 of independent factors, `[H]`: proposition 2 (ii)."""
    return np.asarray(np.expm1(np.log1p(chi2).cumsum()))


def equal_factors(vocabulary: int, horizon: int, chi2: float) -> Tree:
    """Independent positions of equal chi^2: the behaviour policy is uniform, the target policy rises linearly.

    chi2: below 1/3, so that every probability is positive for any vocabulary.
    """
    slope = np.arange(vocabulary) - (vocabulary - 1) / 2
    slope /= np.sqrt((slope**2).mean())
    uniform = np.full((horizon, vocabulary), -np.log(vocabulary))
    return Tree.independent(uniform, uniform + np.log1p(np.sqrt(chi2) * slope))


def sampled_variances(tree: Tree, paths: Paths) -> tuple[FloatArray, FloatArray]:
    """Var rho_{1:t} of sampled sequences, and its standard error, both `[H]`. E rho = 1 is known."""
    squares = (np.exp(tree.log_ratios("cumprod", paths)) - 1) ** 2
    return squares.mean(0), squares.std(0, ddof=1) / np.sqrt(len(squares))
