"""What the theory says holds for the loss of the product: its gradient, on all sequences of a small softmax tree.

`docs/notebooks` enumerates in numpy, with formulas of its own; here autograd runs through `policy_loss`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ctpo_megatron.config import AdvantageConfig
from ctpo_megatron.objective import Denominators, PolicyObjective, policy_loss, turn_advantages
from theory_tree import RATIOS, FloatArray, Tree, relative_bias
from theory_turns import TwoTurns


def tree(seed: int) -> tuple[Tree, FloatArray, FloatArray]:
    """A tree, advantages A(s_t, a_t), and outcome rewards."""
    rng = np.random.default_rng(seed)
    found = Tree.random(rng, vocabulary=3, horizon=4, shift=0.5)
    return found, found.prefix_advantages(rng), found.outcome_advantages(rng)


def loss_gradient(of: Tree, advantages: FloatArray, probability: FloatArray, **more: Any) -> FloatArray:
    """Minus the gradient of the unclipped loss, each sequence times its probability: `[nodes, V]`.

    more: `response_mask` and `turn` of the tokens, and settings of the objective.
    """
    logits = torch.tensor(of.target, requires_grad=True)
    nodes, tokens = torch.tensor(of.paths.nodes), torch.tensor(of.paths.tokens)
    model, turn = more.pop("response_mask", torch.ones_like(tokens)), more.pop("turn", None)
    free = {"clip_low": 1e6, "clip_high": 1e6, "clip_c": None, "loss_agg_mode": "seq-mean-token-sum"}
    out = policy_loss(
        logits.log_softmax(-1)[nodes, tokens],
        torch.tensor(of.behaviour)[nodes, tokens],
        torch.tensor(advantages),
        model,
        PolicyObjective(**free, **more),
        weights=torch.tensor(probability),
        denominators=Denominators(1, 1, 1),
        turn=turn,
    )
    found: FloatArray = -torch.autograd.grad(out.loss, logits)[0].numpy()
    return found


def expected_gradient(of: Tree, ratio: str, advantages: FloatArray) -> FloatArray:
    """E_behaviour of it."""
    return loss_gradient(of, advantages, of.probability, ratio_mode=ratio)


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
            ours, enumerated = expected_gradient(found, ratio, advantages), found.expected_gradient(ratio, advantages)
            assert relative_bias(enumerated, ours) < 3e-12, ratio


def two_turns(seed: int, vocabulary: int = 3, shift: float = 0.5) -> TwoTurns:
    """Turns that earn 1 on average, the second of which some sequences do not have."""
    rng = np.random.default_rng(seed)
    return TwoTurns.random(rng, Tree.random(rng, vocabulary, 4, shift), mean=1.0, may_end=True)


def of_turns(of: TwoTurns, turn_ratio: str, advantages: FloatArray, probability: FloatArray) -> FloatArray:
    """The gradient with advantages of turns: `[N, 2]`."""
    there = torch.tensor(of.of_tokens(np.ones_like(advantages)))
    turn = torch.tensor([1, 1, 2, 2]).expand(len(there), -1)
    given = {"response_mask": there, "turn": turn, "turn_ratio": turn_ratio}
    return loss_gradient(of.tree, of.of_tokens(advantages), probability, **given)


TURN_RATIOS = ("prefix", "turn-end")
EXACT = 1e-11


@pytest.mark.parametrize("seed", range(4))
def test_the_ratio_at_the_end_of_the_turn_is_unbiased_and_the_prefix_is_not(seed: int) -> None:
    of = two_turns(seed)
    true = of.tree.true_gradient(of.of_tokens(of.returns))
    for baseline in ([0.0, 0.0], [1.7, 0.4]):
        found = {ratio: of_turns(of, ratio, of.returns - baseline, of.tree.probability) for ratio in TURN_RATIOS}
        assert relative_bias(found["turn-end"], true) < EXACT
        assert relative_bias(found["prefix"], true) > 0.05


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_of_turns_has_the_gradient_that_the_theory_enumerates(seed: int) -> None:
    of = two_turns(seed)
    for ratio in TURN_RATIOS:
        expected = of.tree.sampled_gradient(of.weighted(ratio, to_go=True))
        assert relative_bias(of_turns(of, ratio, of.returns, of.tree.probability), expected) < EXACT


@pytest.mark.parametrize(("kind", "scale"), [("rloo", 1.0), ("group", 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_groups_of_two_have_no_hidden_bonus(seed: int, kind: str, scale: float) -> None:
    """All pairs of sequences: the first one's gradient, with the baseline that the other one gives."""
    of = two_turns(seed, vocabulary=2)
    config = AdvantageConfig(kind=kind, normalize_std=None if kind == "rloo" else False)
    listed = [list(row[: 1 + there]) for row, there in zip(of.returns, of.continues, strict=True)]
    probability = of.tree.probability
    expected = np.zeros((len(probability), 2))
    for i, own in enumerate(listed):
        for j, other in enumerate(listed):
            (first, _) = turn_advantages([[own, other]], config)
            assert first is not None
            expected[i, : len(first)] += probability[j] * np.array(first)
    true = of.tree.true_gradient(of.of_tokens(of.returns))
    assert relative_bias(of_turns(of, "turn-end", expected, probability), scale * true) < 1e-6  # of float32


@pytest.mark.parametrize("seed", range(3))
def test_normalizing_each_turns_reward_has_one(seed: int) -> None:
    """The bias is minus the mean reward of the second turn times the gradient of the probability of one."""
    of = two_turns(seed)
    advantages = of.with_baseline("rewards")
    earned = of.tree.target_probability @ of.rewards[:, 1] / (of.tree.target_probability @ of.continues)
    assert of.bonus(advantages) == pytest.approx(-earned, rel=1e-9)
    assert abs(of.bonus(of.with_baseline("returns"))) < EXACT


def test_the_variance_is_that_of_all_sequences() -> None:
    of = two_turns(7)
    weights = of.weighted("turn-end", to_go=True)
    each = []
    for place in range(len(weights)):
        one = np.zeros_like(weights)
        one[place] = weights[place]
        each.append(of.tree.sampled_gradient(one / of.tree.probability[:, None]))
    rows, probability = np.array(each), of.tree.probability
    mean = np.tensordot(probability, rows, 1)
    expected = probability @ ((rows - mean) ** 2).sum((1, 2))
    assert of.tree.trace_variance(weights) == pytest.approx(expected, rel=1e-10)
