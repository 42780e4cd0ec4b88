"""Objective: CTPO and related objectives, by `ctpo_kernels` where these have them and in plain torch otherwise.

    rewards --batch_advantages--> A --+
    log_probs, old_log_probs, masks ---------+--policy_loss(objective, denominators)--> loss, per_token, stats
    weights --------------------------+

- `PolicyObjective.preset("ctpo")`, `objective_from_config(config)`: which ratio, clip and aggregation.
- `policy_loss`: the loss of a padded or packed batch; `linear_policy_loss`: of hidden states and the output layer.
- `warm_up_kernels`: compiles what these launch on a GPU.
- `supervised_loss`: negative log-likelihood of SFT.
- `Denominators`: counts of the whole optimizer step, so that the split into micro-batches changes nothing.
- `batch_advantages`, `turn_advantages`, `correct` (weights and rejection): inputs of the loss.
- `MismatchRows`, `correction_metrics`, `noise_metrics`: measures of the sampler-trainer mismatch.
- `Objective`, `ObjectiveInputs`, `ObjectiveOutput`: a user's objective (`objective.function`).
- `merge`, `summarize`: statistics of several micro-batches and ranks -> metrics.
- `token_diagnostics`: log r_t and its clip window per token, for reports.
- `PositionStats`: sums by position in the response, for figures of S_t and of clip rates against t.
"""

from ctpo_megatron.base.positions import PositionStats
from ctpo_megatron.config import PRESETS, PolicyObjective, objective_from_config
from ctpo_megatron.objective.advantages import Advantage, batch_advantages, group_advantages, turn_advantages
from ctpo_megatron.objective.aggregation import Denominators
from ctpo_megatron.objective.function import (
    Objective,
    ObjectiveInputs,
    ObjectiveOutput,
    function_loss,
    load_objective,
    objective_problem,
)
from ctpo_megatron.objective.mismatch import (
    Corrected,
    MismatchRows,
    correct,
    correction_metrics,
    noise_metrics,
    weight_mean,
)
from ctpo_megatron.objective.policy_loss import linear_policy_loss, policy_loss, supervised_loss, warm_up_kernels
from ctpo_megatron.objective.positions import (
    SamplerTokens,
    position_metrics,
    position_stats,
    skipped_stats,
    window_metrics,
)
from ctpo_megatron.objective.stats import LossStats, PolicyLossOutput, merge, summarize
from ctpo_megatron.objective.surrogate import TokenDiagnostics, token_diagnostics

__all__ = ["ObjectiveInputs", "ObjectiveOutput"]
"""What users' parts import."""
