"""An objective of one's own: a ratio that saturates smoothly, in place of a clip."""

import torch

from ctpo_megatron.objective import ObjectiveInputs, ObjectiveOutput


def soft_clip(inputs: ObjectiveInputs, *, width: float = 0.2) -> ObjectiveOutput:
    """width: bound of the log-ratio in nats."""
    log_ratio = inputs.log_probs - inputs.old_log_probs
    bounded = width * torch.tanh(log_ratio / width)
    return ObjectiveOutput(-inputs.advantages * bounded.exp(), {"log_ratio_abs": log_ratio.abs()})
