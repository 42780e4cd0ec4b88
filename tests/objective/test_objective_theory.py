"""What the theory says holds for the loss of the product: its gradient, on all sequences of a small softmax tree.

`docs/notebooks` enumerates in numpy, with formulas of its own; here autograd runs through `policy_loss`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ctpo_megatron.objective import Denominators, PolicyObjective, policy_loss
from theory_tree import RATIOS, FloatArray, Tree, relative_bias


def tree(seed: int) -> tuple[Tree, FloatArray, FloatArray]:
    """A tree, advantages A(s_t, a_t), and outcome rewards."""
    rng = np.random.default_rng(seed)
    found = Tree.random(rng, vocabulary=3, horizon=4, shift=0.5)
    return found, found.prefix_advantages(rng), found.outcome_advantages(rng)


def expected_gradient(of: Tree, ratio: str, advantages: FloatArray) -> FloatArray:
    """E_behaviour of minus the gradient of the loss, unclipped: `[nodes, V]`."""
    free = {
        "clip_mode": "log_power",
        "clip_low": 1e6,
        "clip_high": 1e6,
        "clip_c": None,
        "loss_agg_mode": "seq-mean-token-sum",
    }
    logits = torch.tensor(of.target, requires_grad=True)
    nodes, tokens = torch.tensor(of.paths.nodes), torch.tensor(of.paths.tokens)
    out = policy_loss(
        logits.log_softmax(-1)[nodes, tokens],
        torch.tensor(of.behaviour)[nodes, tokens],
        torch.tensor(advantages),
        torch.ones_like(tokens),
        PolicyObjective(ratio_mode=ratio, **free),
        weights=torch.tensor(of.probability),
        denominators=Denominators(1, 1, 1),
    )
    return -torch.autograd.grad(out.loss, logits)[0].numpy()


def true_gradient(of: Tree, advantages: FloatArray) -> FloatArray:
    """E_target[sum_t A_t grad log target(a_t | s_t)], by autograd."""
    logits = torch.tensor(of.target, requires_grad=True)
    log_probs: Tensor = logits.log_softmax(-1)[torch.tensor(of.paths.nodes), torch.tensor(of.paths.tokens)]
    probability = log_probs.sum(1).exp().detach()
    return torch.autograd.grad((probability[:, None] * torch.tensor(advantages) * log_probs).sum(), logits)[0].numpy()


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_has_the_gradient_that_the_theory_enumerates(seed: int) -> None:
    found, prefix, outcome = tree(seed)
    for advantages in (prefix, outcome):
        assert relative_bias(found.true_gradient(advantages), true_gradient(found, advantages)) < 3e-12
        for ratio in RATIOS:
            assert (
                relative_bias(
                    found.expected_gradient(ratio, advantages),
                    expected_gradient(found, ratio, advantages),
                )
                < 3e-12
            ), ratio


@pytest.mark.parametrize("seed", range(3))
def test_proposition_1_cumulative_ratio_is_unbiased_for_prefix_measurable_advantages(seed: int) -> None:
    found, advantages, _ = tree(seed)
    true = true_gradient(found, advantages)
    assert relative_bias(expected_gradient(found, "cumprod", advantages), true) < 3e-12
    assert relative_bias(expected_gradient(found, "token", advantages), true) > 0.05


@pytest.mark.parametrize("seed", range(3))
def test_outcome_rewards_leave_the_cumulative_ratio_biased(seed: int) -> None:
    """One reward for the whole sequence: the suffix still follows mu. Less biased than the token ratio, not unbiased.

    The full-sequence ratio is the unbiased one, at the price of its variance.
    """
    found, _, outcome = tree(seed)
    true = true_gradient(found, outcome)
    bias = {ratio: relative_bias(expected_gradient(found, ratio, outcome), true) for ratio in RATIOS}
    assert 0.01 < bias["cumprod"] < bias["token"]
    assert bias["sequence"] < 3e-12
