"""Mean square error of a gradient on trees: its parts against enumeration, and the clip against its rule."""

from __future__ import annotations

import math

import numpy as np
import pytest

from theory_error import GradientError, clipped_weights, normalized_reward
from theory_tables import clipped_error_table, error_table
from theory_tree import FloatArray, Tree


def rewarded(seed: int = 0, horizon: int = 4, shift: float = 0.3) -> tuple[Tree, FloatArray]:
    rng = np.random.default_rng(seed)
    tree = Tree.random(rng, 3, horizon, shift)
    return tree, normalized_reward(tree, rng)


@pytest.mark.parametrize("ratio", ["token", "cumprod", "sequence"])
def test_the_error_of_one_trajectory_is_its_mean_squared_distance(ratio: str) -> None:
    tree, advantages = rewarded()
    weights = np.exp(tree.log_ratios(ratio)) * advantages
    true, likely = tree.true_gradient(advantages), np.exp(tree.target)
    distances = []
    for nodes, tokens, weight in zip(tree.paths.nodes, tree.paths.tokens, weights, strict=True):
        gradient = np.zeros_like(true)
        gradient[nodes, tokens] += weight
        gradient[nodes] -= weight[:, None] * likely[nodes]
        distances.append(((gradient - true) ** 2).sum() / (true**2).sum())
    error = GradientError.of(tree, weights, advantages)
    assert error.at(1) == pytest.approx(tree.probability @ distances, rel=1e-12)
    assert error.at(10**12) == pytest.approx(error.bias, abs=1e-9)


def test_the_break_even_is_where_both_errors_are_equal() -> None:
    token, prefix = GradientError(0.1, 30.0, 0.9), GradientError(0.04, 33.0, 0.95)
    count = prefix.better_from(token)
    assert count == pytest.approx(50)
    assert prefix.at(51) < token.at(51) and prefix.at(49) > token.at(49)
    assert token.better_from(prefix) == math.inf and GradientError(0.04, 20.0, 1.0).better_from(token) == 0


def test_a_reward_has_mean_zero_and_variance_one() -> None:
    tree, advantages = rewarded()
    assert tree.probability @ advantages[:, 0] == pytest.approx(0, abs=1e-12)
    assert tree.probability @ advantages[:, 0] ** 2 == pytest.approx(1)


def test_grpo_cuts_by_the_sign_of_the_advantage_and_leaves_the_rest() -> None:
    tree, advantages = rewarded(shift=0.7)
    r = np.exp(tree.log_ratios("token"))
    beyond = np.where(advantages > 0, r > 1.2, r < 0.8)
    weights, cut = clipped_weights(tree, "grpo", advantages)
    assert (cut == beyond).all() and 0.1 < cut.mean() < 0.9
    np.testing.assert_allclose(weights, np.where(beyond, 0, r * advantages), rtol=1e-12, atol=1e-15)


def test_a_weight_limit_beyond_all_ratios_leaves_the_token_ratio() -> None:
    tree, advantages = rewarded(shift=0.1)
    weights, cut = clipped_weights(tree, "cispo", advantages)
    assert not cut.any()
    np.testing.assert_allclose(weights, np.exp(tree.log_ratios("token")) * advantages, rtol=1e-12)


def test_what_the_notebook_says_of_its_tables() -> None:
    rng = np.random.default_rng(3)
    far, near = ([Tree.random(rng, 3, 6, shift) for _ in range(20)] for shift in (0.3, 0.05))
    table = error_table(far, rng)
    assert table.column("below token from")[0] == "" and 50 < float(table.column("below token from")[1]) < 1_000
    clipped = clipped_error_table([near, far], rng)
    bias = dict(zip(clipped.column("objective")[:4], map(float, clipped.column("squared bias")[:4]), strict=True))
    assert bias["CTPO"] > 20 * bias["CISPO"] and bias["GSPO"] > 20 * bias["CISPO"]
    assert float(clipped.column("cut")[1]) < 0.01 < 0.05 < float(clipped.column("cut")[0])
