"""PPO's clip on the tokens of high entropy alone, where the policy still chooses (after arXiv 2506.01939)."""

import itertools

import torch

from ctpo_megatron.objective import ObjectiveInputs, ObjectiveOutput


def high_entropy(inputs: ObjectiveInputs, *, share: float = 0.2, width: float = 0.2) -> ObjectiveOutput:
    """share: of the loss tokens of each sequence, those of the highest entropy. width: of the clip of r."""
    ratio, a = (inputs.log_probs - inputs.old_log_probs).exp(), inputs.advantages
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - width, 1 + width))
    kept = torch.zeros_like(inputs.loss_mask)
    for start, end in itertools.pairwise(inputs.cu_seqlens.tolist()):
        mask, entropy = inputs.loss_mask[start:end], inputs.entropy[start:end]
        if mask.any():
            kept[start:end] = mask & (entropy >= entropy[mask].quantile(1 - share))
    return ObjectiveOutput(loss * kept, {"kept": kept.float(), "entropy": inputs.entropy})
