"""Credit by turn in the loss of the product: the expected gradient over all sequences, and over all pairs of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ctpo_megatron.config import AdvantageConfig
from ctpo_megatron.objective import Denominators, PolicyObjective, policy_loss, turn_advantages
from theory_tree import FloatArray, Tree, relative_bias
from theory_turns import TwoTurns

EXACT = 1e-11
FREE = {"clip_low": 1e6, "clip_high": 1e6, "clip_c": None, "loss_agg_mode": "seq-mean-token-sum"}


def task(seed: int, vocabulary: int = 3, shift: float = 0.5) -> TwoTurns:
    """Turns that earn 1 on average, the second of which some sequences do not have."""
    rng = np.random.default_rng(seed)
    return TwoTurns.random(rng, Tree.random(rng, vocabulary, 4, shift), mean=1.0, may_end=True)


def gradient(of: TwoTurns, turn_ratio: str, advantages: FloatArray, probability: FloatArray) -> FloatArray:
    """Minus the gradient of the loss, each sequence times its probability; advantages of turns: `[N, 2]`."""
    tree = of.tree
    logits = torch.tensor(tree.target, requires_grad=True)
    nodes, tokens = torch.tensor(tree.paths.nodes), torch.tensor(tree.paths.tokens)
    out = policy_loss(
        logits.log_softmax(-1)[nodes, tokens],
        torch.tensor(tree.behaviour)[nodes, tokens],
        torch.tensor(of.of_tokens(advantages)),
        torch.tensor(of.of_tokens(np.ones_like(advantages))),
        PolicyObjective(turn_ratio=turn_ratio, **FREE),
        weights=torch.tensor(probability),
        denominators=Denominators(1, 1, 1),
        turn=torch.tensor([1, 1, 2, 2]).expand(len(tokens), -1),
    )
    found: Tensor = -torch.autograd.grad(out.loss, logits)[0]
    return found.numpy()


@pytest.mark.parametrize("seed", range(4))
def test_the_ratio_at_the_end_of_the_turn_is_unbiased_and_the_prefix_is_not(seed: int) -> None:
    of = task(seed)
    true = of.tree.true_gradient(of.of_tokens(of.returns))
    for baseline in ([0.0, 0.0], [1.7, 0.4]):
        found = {ratio: gradient(of, ratio, of.returns - baseline, of.tree.probability) for ratio in RATIOS}
        assert relative_bias(found["turn-end"], true) < EXACT
        assert relative_bias(found["prefix"], true) > 0.05


RATIOS = ("prefix", "turn-end")


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_has_the_gradient_that_the_theory_enumerates(seed: int) -> None:
    of = task(seed)
    for ratio in RATIOS:
        expected = of.tree.sampled_gradient(of.weighted(ratio, to_go=True))
        assert relative_bias(gradient(of, ratio, of.returns, of.tree.probability), expected) < EXACT


@pytest.mark.parametrize(("kind", "scale"), [("rloo", 1.0), ("group", 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_groups_of_two_have_no_hidden_bonus(seed: int, kind: str, scale: float) -> None:
    """All pairs of sequences: the first one's gradient, with the baseline that the other one gives."""
    of = task(seed, vocabulary=2)
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
    assert relative_bias(gradient(of, "turn-end", expected, probability), scale * true) < 1e-6  # of float32


@pytest.mark.parametrize("seed", range(3))
def test_normalizing_each_turns_reward_has_one(seed: int) -> None:
    """The bias is minus the mean reward of the second turn times the gradient of the probability of one."""
    of = task(seed)
    advantages = of.with_baseline("rewards")
    earned = of.tree.target_probability @ of.rewards[:, 1] / (of.tree.target_probability @ of.continues)
    assert of.bonus(advantages) == pytest.approx(-earned, rel=1e-9)
    assert abs(of.bonus(of.with_baseline("returns"))) < EXACT


def test_the_variance_is_that_of_all_sequences() -> None:
    of = task(7)
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
