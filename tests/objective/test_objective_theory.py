"""What the theory says, by exact enumeration of all sequences of a small softmax tree (V = 3 tokens, H = 4 steps)."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ctpo_megatron.objective import Denominators, PolicyObjective, policy_loss

V, H = 3, 4
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=H)))  # [81, 4]
# Node of the tree (prefix) in which each token is drawn: 1 + 3 + 9 + 27 nodes, breadth first.
NODES = torch.stack(
    [(V**t - 1) // (V - 1) + sum(SEQUENCES[:, k] * V ** (t - 1 - k) for k in range(t)) + 0 * SEQUENCES[:, 0]
     for t in range(H)], dim=1,
)  # fmt: skip


class Tree:
    """A current policy pi, a behaviour policy mu near it, and their log-probabilities of every sequence."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.nodes = int(NODES.max()) + 1
        self.mu = torch.randn(self.nodes, V, generator=g, dtype=torch.float64)
        shift = 0.5 * torch.randn(self.nodes, V, generator=g, dtype=torch.float64)
        self.pi = (self.mu + shift).requires_grad_()
        self.prefix_advantage = torch.randn(self.nodes, V, generator=g, dtype=torch.float64)[NODES, SEQUENCES]
        self.reward = torch.randn(len(SEQUENCES), generator=g, dtype=torch.float64)

    @staticmethod
    def log_probs(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)[NODES, SEQUENCES]

    def expected_gradient(self, ratio: str, advantages: Tensor) -> Tensor:
        """E_mu of the gradient of the loss, unclipped: `[nodes, V]`."""
        free = {
            "clip_mode": "log_power",
            "clip_low": 1e6,
            "clip_high": 1e6,
            "clip_c": None,
            "loss_agg_mode": "seq-mean-token-sum",
        }
        objective = PolicyObjective(ratio_mode=ratio, **free)
        behaviour = self.log_probs(self.mu)
        probability = behaviour.sum(1).exp()
        out = policy_loss(
            self.log_probs(self.pi), behaviour, advantages, torch.ones_like(SEQUENCES), objective,
            weights=probability, denominators=Denominators(1, 1, 1),
        )  # fmt: skip
        return torch.autograd.grad(out.loss, self.pi)[0]

    def true_gradient(self, advantages: Tensor) -> Tensor:
        """-E_pi[sum_t A_t grad log pi(a_t | s_t)], `[nodes, V]`."""
        log_probs = self.log_probs(self.pi)
        probability = log_probs.sum(1).exp().detach()
        return torch.autograd.grad(-(probability[:, None] * advantages * log_probs).sum(), self.pi)[0]


def relative_bias(got: Tensor, true: Tensor) -> float:
    return ((got - true).norm() / true.norm()).item()


@pytest.mark.parametrize("seed", range(3))
def test_proposition_1_cumulative_ratio_is_unbiased_for_prefix_measurable_advantages(seed):
    tree = Tree(seed)
    true = tree.true_gradient(tree.prefix_advantage)
    assert relative_bias(tree.expected_gradient("cumprod", tree.prefix_advantage), true) < 3e-12
    assert relative_bias(tree.expected_gradient("token", tree.prefix_advantage), true) > 0.05


def test_proposition_1_token_ratio_is_biased_from_the_second_token_on():
    tree = Tree(0)
    for t in range(H):
        only_t = torch.zeros_like(tree.prefix_advantage)
        only_t[:, t] = tree.prefix_advantage[:, t]
        true = tree.true_gradient(only_t)
        bias = relative_bias(tree.expected_gradient("token", only_t), true)
        assert bias < 3e-12 if t == 0 else bias > 0.05
        assert relative_bias(tree.expected_gradient("cumprod", only_t), true) < 3e-12


@pytest.mark.parametrize("seed", range(3))
def test_proposition_2_the_whole_sequence_ratio_varies_more_than_any_prefix(seed):
    tree = Tree(seed)
    behaviour = tree.log_probs(tree.mu)
    probability = behaviour.sum(1).exp()
    ratio = (tree.log_probs(tree.pi).detach() - behaviour).cumsum(1).exp()  # rho_{1:t}
    torch.testing.assert_close(probability @ ratio, torch.ones(H, dtype=torch.float64))
    variance = probability @ (ratio - 1).square()
    assert (variance.diff() > 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_outcome_rewards_leave_the_cumulative_ratio_biased(seed):
    """One reward for the whole sequence: the suffix still follows mu. Less biased than the token ratio, not unbiased.

    The full-sequence ratio is the unbiased one, at the price of its variance.
    """
    tree = Tree(seed)
    outcome = tree.reward[:, None].expand(-1, H)
    true = tree.true_gradient(outcome)
    bias = {r: relative_bias(tree.expected_gradient(r, outcome), true) for r in ("cumprod", "token", "sequence")}
    assert 0.01 < bias["cumprod"] < bias["token"]
    assert bias["sequence"] < 3e-12
