"""Propositions 1 and 2 on enumerated trees: what holds on every tree, and formulas against sums and samples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory_tables import Counterexample
from theory_tree import (
    RATIOS,
    Tree,
    chi_squared,
    equal_factors,
    independent_variances,
    log_softmax,
    sampled_variances,
    second_moments,
    suffix_share,
    variances,
)

ROUNDING = 1e-12
trees = st.builds(
    lambda seed, size, shift: Tree.random(np.random.default_rng(seed), *size, shift),
    st.integers(0, 2**32),
    st.sampled_from([(2, 2), (2, 3), (2, 6), (3, 2), (3, 4), (4, 3), (7, 2)]),
    st.floats(0.05, 1.5),
)
"""Of several vocabularies and lengths."""


def four(seed: int = 0, shift: float = 0.7) -> Tree:
    """The tree of the command."""
    return Tree.random(np.random.default_rng(seed), 3, 4, shift)


@settings(max_examples=60)
@given(trees, st.integers(0, 2**32))
def test_proposition_1_the_prefix_ratio_is_unbiased_in_every_term(tree: Tree, seed: int) -> None:
    advantages = tree.prefix_advantages(np.random.default_rng(seed))
    true = tree.true_gradient(advantages)
    size = np.abs(true).max()
    for ratio in ("cumprod", "sequence"):
        np.testing.assert_allclose(tree.expected_gradient(ratio, advantages), true, atol=ROUNDING * size, rtol=0)


@settings(max_examples=60)
@given(trees, st.integers(0, 2**32))
def test_an_outcome_reward_leaves_all_terms_of_the_prefix_ratio_biased_but_the_last(tree: Tree, seed: int) -> None:
    outcome = tree.outcome_advantages(np.random.default_rng(seed))
    assert tree.bias_by_position("cumprod", outcome)[-1] < 1e-10
    assert (tree.bias_by_position("cumprod", outcome)[:-1] > 1e-6).all()
    assert (tree.bias_by_position("sequence", outcome) < 1e-10).all()


@settings(max_examples=60)
@given(trees)
def test_proposition_2_the_sequence_ratio_varies_more_by_what_follows(tree: Tree) -> None:
    prefix, sequence = variances(tree, "cumprod"), variances(tree, "sequence")
    assert (np.diff(prefix) > 0).all()
    np.testing.assert_allclose(sequence, prefix[-1], rtol=1e-12)
    np.testing.assert_allclose(sequence - prefix, suffix_share(tree), rtol=1e-9, atol=1e-11 * sequence[0])


@pytest.mark.parametrize("seed", range(5))
def test_the_token_ratio_is_biased_from_the_second_token_on_and_gspo_everywhere(seed: int) -> None:
    tree = four(seed)
    advantages = tree.prefix_advantages(np.random.default_rng(seed + 100))
    token = tree.bias_by_position("token", advantages)
    assert token[0] < ROUNDING and (token[1:] > 0.05).all()
    assert (tree.bias_by_position("sequence-geomean", advantages) > 0.01).all()


def test_order_of_the_bias_with_one_outcome_reward() -> None:
    """The order of the median over trees; on a single one it may be another."""
    rng = np.random.default_rng(0)
    found = {ratio: [] for ratio in RATIOS}
    for seed in range(100):
        tree = four(seed)
        outcome = tree.outcome_advantages(rng)
        for ratio, bias in found.items():
            bias.append(tree.bias(ratio, outcome))
    assert max(found["sequence"]) < ROUNDING
    assert np.median(found["cumprod"]) + 0.1 < np.median(found["token"])
    assert np.median(found["cumprod"]) + 0.1 < np.median(found["sequence-geomean"])
    assert np.median(found["cumprod"]) > 0.1


@settings(max_examples=40)
@given(trees)
def test_expectations_over_all_sequences(tree: Tree) -> None:
    """Probabilities add up to 1, and the mean of every ratio whose mean is 1 is; nodes are the prefixes."""
    assert tree.probability.sum() == pytest.approx(1, abs=1e-13)
    for ratio in ("token", "cumprod", "sequence"):
        np.testing.assert_allclose(tree.probability @ np.exp(tree.log_ratios(ratio)), 1, atol=1e-10)
    prefixes: dict[int, set[tuple[int, ...]]] = {}
    for nodes, tokens in zip(tree.paths.nodes.tolist(), tree.paths.tokens.tolist(), strict=True):
        for t, node in enumerate(nodes):
            prefixes.setdefault(node, set()).add(tuple(tokens[:t]))
    assert sorted(prefixes) == list(range(len(tree.behaviour)))
    assert all(len(found) == 1 for found in prefixes.values())
    assert len(set(map(tuple, tree.paths.tokens.tolist()))) == tree.vocabulary**tree.horizon


def test_the_gradient_is_the_derivative_of_the_expected_reward() -> None:
    """By central differences of E_target[R], in every logit."""
    tree = four()
    outcome = tree.outcome_advantages(np.random.default_rng(1))
    gradient, step = tree.true_gradient(outcome), 1e-5

    def expected(node: int, token: int, by: float) -> float:
        logits = tree.target.copy()
        logits[node, token] += by
        moved = Tree(log_softmax(logits), log_softmax(logits), tree.horizon)
        return float(moved.probability @ outcome[:, 0])

    for node, token in itertools.product(range(len(tree.target)), range(3)):
        slope = (expected(node, token, step) - expected(node, token, -step)) / (2 * step)
        assert gradient[node, token] == pytest.approx(slope, abs=1e-9)


def test_samples_are_drawn_from_the_behaviour_policy() -> None:
    """Shares of all 81 sequences of 200,000 samples, by the chi-squared statistic: its mean is 80, its std 12.6."""
    tree, count = four(), 200_000
    paths = tree.sample(np.random.default_rng(0), count)
    place = paths.tokens @ 3 ** np.arange(3, -1, -1)
    expected = count * tree.probability
    assert ((np.bincount(place, minlength=81) - expected) ** 2 / expected).sum() < 80 + 5 * math.sqrt(160)
    np.testing.assert_array_equal(paths.nodes, tree.paths.nodes[place])


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([(2, 5), (3, 4), (5, 3)]))
def test_proposition_2_of_independent_factors(seed: int, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    vocabulary, horizon = size
    behaviour, target = log_softmax(rng.standard_normal((2, horizon, vocabulary)))
    tree, chi2 = Tree.independent(behaviour, target), chi_squared(behaviour, target)
    np.testing.assert_allclose(variances(tree, "token"), chi2, rtol=1e-9)
    np.testing.assert_allclose(variances(tree, "cumprod"), independent_variances(chi2), rtol=1e-9)


def test_sampled_variances_are_within_four_standard_errors() -> None:
    rng = np.random.default_rng(0)
    behaviour = log_softmax(rng.standard_normal((4, 3)))
    target = log_softmax(behaviour + 0.4 * rng.standard_normal((4, 3)))
    tree = Tree.independent(behaviour, target)
    sampled, error = sampled_variances(tree, tree.sample(rng, 100_000))
    exact = independent_variances(chi_squared(behaviour, target))
    assert (np.abs(sampled - exact) < 4 * error).all()
    assert (error < 0.03 * exact).all(), "an error as large as the value would allow anything"


@pytest.mark.parametrize(("vocabulary", "horizon"), [(2, 5), (3, 4), (10, 3)])
@pytest.mark.parametrize("chi2", [0.2, 0.01, 1e-6])
def test_equal_factors(vocabulary: int, horizon: int, chi2: float) -> None:
    tree, t = equal_factors(vocabulary, horizon, chi2), np.arange(1, horizon + 1)
    np.testing.assert_allclose(variances(tree, "token"), chi2, rtol=1e-9)
    moments, variance = second_moments(tree, "cumprod"), variances(tree, "cumprod")
    np.testing.assert_allclose(moments[-1] / moments, (1 + chi2) ** (horizon - t), rtol=1e-11)
    np.testing.assert_allclose(variance, (1 + chi2) ** t - 1, rtol=1e-8)
    if chi2 < 1e-5:
        np.testing.assert_allclose(variance[-1] / variance, horizon / t, rtol=1e-5)


probability = st.floats(0.05, 0.95)


@settings(max_examples=50)
@given(st.builds(Counterexample, probability, probability, probability, probability))
def test_counterexample(example: Counterexample) -> None:
    """The first logit of CTPO has the behaviour policy's second action; the sequence ratio has the target policy's."""
    found, p = example.enumerated(), example.p
    assert found["true"] == pytest.approx((p * (1 - p) * example.q, p * example.q * (1 - example.q)), rel=1e-9)
    assert found["cumprod"] == pytest.approx((p * (1 - p) * example.q_b, found["true"][1]), rel=1e-9)
    assert found["sequence"] == pytest.approx(found["true"], rel=1e-9)
    for name, expected in example.formulas().items():
        assert found[name] == pytest.approx(expected, rel=1e-9)
