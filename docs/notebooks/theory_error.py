"""Mean square error of each ratio's gradient on trees, without and with the clip, by the number of trajectories."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ctpo_megatron.objective import PolicyObjective, policy_loss
from theory_tree import BoolArray, FloatArray, Tree, relative_bias

OBJECTIVES = {"ctpo": "CTPO", "grpo": "GRPO", "gspo": "GSPO", "cispo": "CISPO", "ctpo-weight": "CTPO, limited weight"}
"""Preset -> what the tables call it."""


@dataclass(frozen=True)
class GradientError:
    """What is known of an estimate of the gradient from one trajectory.

    bias, variance: squared bias and trace variance over the squared norm of the true gradient. cosine: of the angle
    between the expected and the true gradient, which is what counts where the optimizer divides by the scale.
    """

    bias: float
    variance: float
    cosine: float

    @classmethod
    def of(cls, tree: Tree, weights: FloatArray, advantages: FloatArray) -> GradientError:
        """Of sum_t w_t grad log target(a_t | s_t) for a trajectory of the behaviour policy; both `[N, H]`."""
        true, expected = tree.true_gradient(advantages), tree.sampled_gradient(weights)
        size = float((true**2).sum())
        cosine = float((true * expected).sum() / np.sqrt(size * (expected**2).sum()))
        return cls(relative_bias(expected, true) ** 2, tree.trace_variance(weights) / size, cosine)

    def at(self, trajectories: int) -> float:
        """Mean square error of the mean over this many trajectories."""
        return self.bias + self.variance / trajectories

    def better_from(self, other: GradientError) -> float:
        """Trajectories from which this estimate has the smaller mean square error; inf where it never has."""
        less_bias, more_variance = other.bias - self.bias, self.variance - other.variance
        if less_bias <= 0:
            return 0.0 if less_bias == 0 and more_variance < 0 else math.inf
        return max(more_variance, 0.0) / less_bias


def normalized_reward(tree: Tree, rng: np.random.Generator) -> FloatArray:
    """Return one reward for the whole sequence, of mean 0 and variance 1 under the behaviour policy, `[N, H]`."""
    advantages = tree.outcome_advantages(rng)
    centred = advantages - tree.probability @ advantages
    return np.asarray(centred / np.sqrt(tree.probability @ centred**2))


def clipped_weights(tree: Tree, preset: str, advantages: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Return the factor of grad log target(a_t | s_t) in the trainer's loss, and where a bound acts; both `[N, H]`."""
    objective = PolicyObjective.preset(preset, loss_agg_mode="seq-mean-token-sum", loss_scale_factor=1.0)
    log_probs, anchor = (
        torch.from_numpy(policy[tree.paths.nodes, tree.paths.tokens]) for policy in (tree.target, tree.behaviour)
    )
    log_probs.requires_grad_()
    everywhere = torch.ones_like(log_probs)
    loss = policy_loss(log_probs, anchor, torch.from_numpy(advantages), everywhere, objective)
    (gradient,) = torch.autograd.grad(loss.loss, log_probs)
    weights = -len(log_probs) * gradient.numpy()
    unbounded = np.exp(tree.log_ratios(objective.ratio_mode)) * advantages
    return weights, ~np.isclose(weights, unbounded, rtol=1e-9)
