"""Objective: the mathematics of CTPO and its relatives in plain torch. The specification that kernels must equal.

    rewards --batch_advantages--> A --+
    log_probs, old_log_probs, masks ---------+--policy_loss(objective, denominators)--> loss, per_token, stats
    correction_weights ---------------+

- `PolicyObjective.preset("ctpo")`, `objective_from_config(config)`: which ratio, clip and aggregation.
- `policy_loss`: the loss of a padded or packed batch; `linear_policy_loss`: of hidden states and the output layer.
- `supervised_loss`: negative log-likelihood of SFT.
- `Denominators`: counts of the whole optimizer step, so that cutting it into micro-batches changes nothing.
- `batch_advantages`, `correction_weights`: inputs of the loss.
- `Objective`, `ObjectiveInputs`, `ObjectiveOutput`: a user's objective (`objective.function`).
- `merge`, `summarize`: statistics of several micro-batches and ranks -> metrics.
- `token_diagnostics`: log r_t beside its clip window, for people to look at.
"""

from ctpo_megatron.config import PRESETS, PolicyObjective, objective_from_config
from ctpo_megatron.objective.advantages import batch_advantages, group_advantages
from ctpo_megatron.objective.aggregation import Denominators
from ctpo_megatron.objective.correction import correction_weights
from ctpo_megatron.objective.diagnostics import TokenDiagnostics, token_diagnostics
from ctpo_megatron.objective.function import (
    Objective,
    ObjectiveInputs,
    ObjectiveOutput,
    check_objective,
    function_loss,
    load_objective,
)
from ctpo_megatron.objective.fused import LinearPolicyLoss, linear_policy_loss
from ctpo_megatron.objective.policy_loss import PolicyLossOutput, policy_loss
from ctpo_megatron.objective.stats import LossStats, merge, summarize
from ctpo_megatron.objective.supervised import supervised_loss

__all__ = [
    "PRESETS",
    "Denominators",
    "LinearPolicyLoss",
    "LossStats",
    "Objective",
    "ObjectiveInputs",
    "ObjectiveOutput",
    "PolicyLossOutput",
    "PolicyObjective",
    "TokenDiagnostics",
    "batch_advantages",
    "check_objective",
    "correction_weights",
    "function_loss",
    "group_advantages",
    "linear_policy_loss",
    "load_objective",
    "merge",
    "objective_from_config",
    "policy_loss",
    "summarize",
    "supervised_loss",
    "token_diagnostics",
]
