"""M2PO's trust region: the tokens furthest from the sampler leave the loss until the second moment of log r is small.

After arXiv 2510.01161, which takes the moment over a batch. Here each sequence has its own, because a function sees one
micro-batch, and the loss must not depend on how a step is cut into these.
"""

import itertools

import torch

from ctpo_megatron.objective import ObjectiveInputs, ObjectiveOutput


def m2po(inputs: ObjectiveInputs, *, most: float = 0.04) -> ObjectiveOutput:
    """most: mean of (log r)^2 over the tokens of a sequence that stay, nats^2."""
    log_ratio = inputs.log_probs - inputs.rollout_log_probs
    moment = log_ratio.detach().square()
    kept = torch.zeros_like(inputs.loss_mask)
    for start, end in itertools.pairwise(inputs.cu_seqlens.tolist()):
        kept[start:end] = _nearest(moment[start:end], inputs.loss_mask[start:end], most)
    cut = inputs.loss_mask & ~kept
    age = inputs.version - inputs.weight_version
    metrics = {"kept": kept.float(), "second_moment": moment, "age_of_cut": ((age * cut).sum(), cut.sum())}
    return ObjectiveOutput(-inputs.advantages * log_ratio.exp() * kept, metrics)


def _nearest(moment: torch.Tensor, mask: torch.Tensor, most: float) -> torch.Tensor:
    """bool `[T]`: as many tokens of `mask` with the smallest moments as have a mean of at most `most`."""
    order = torch.where(mask, moment, torch.inf).argsort()
    mean = moment[order].cumsum(0) / torch.arange(1, len(order) + 1, device=order.device)
    kept = torch.zeros_like(mask)
    kept[order] = (mean <= most) & mask[order]
    return kept
