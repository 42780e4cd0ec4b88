"""A user's objective: the inputs and outputs of `objective.function`, and how its output becomes a loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ctpo_megatron.base.extensions import ExtensionError, call_problem, load
from ctpo_megatron.config import Extension, PolicyObjective
from ctpo_megatron.objective.aggregation import Denominators, token_scale
from ctpo_megatron.objective.ratios import SequenceBounds, token_log_ratio
from ctpo_megatron.objective.stats import LossStats, PolicyLossOutput, stats_of


@dataclass(frozen=True)
class ObjectiveInputs:
    """One packed micro-batch. Tensors are `[N]`, sequences laid end to end, each whole; cu_seqlens is int32 `[B + 1]`.

    log_probs: float32 nats, the only differentiable tensor; 0 where response_mask is False.
    old_log_probs: the denominator of the ratios, see `objective.anchor`. rollout_log_probs: as the sampler reported.
    advantages: one per token, of its turn with `credit: turn`. response_mask: bool, the policy sampled the token.
    loss_mask: bool, its loss counts.
    denominators: counts of the whole optimizer step, over all its micro-batches and ranks. weights: correction factors
    of `objective.correction`, which the function applies itself; None without.

    Every run gives the rest; what a token that the policy did not sample has there means nothing, but for the turn.
    turn: int16, the turn of each token, from 1; an observation has the number of the turn before it, a prompt 0.
    entropy: float32 nats, of the policy in training where it sampled the token, detached. weight_version: int32, of the
    weights that sampled the token. version: of the trainer's weights before the updates of the step; the difference is
    the age of the token. group: int32, the same for all samples of one draw of a prompt. A micro-batch may hold a part
    of a group.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    denominators: Denominators
    weights: Tensor | None = None
    turn: Tensor | None = None
    entropy: Tensor | None = None
    weight_version: Tensor | None = None
    version: int | None = None
    group: Tensor | None = None


@dataclass(frozen=True)
class ObjectiveOutput:
    """loss: `[N]`, token losses, to be aggregated as `objective.loss_agg_mode` says. Or a scalar, this micro-batch's
    share of the loss of the step (divide by `denominators`, not by counts of the micro-batch).

    metrics: name -> `[N]` (reported as the mean over the loss tokens of the step) or a pair (sum, count), added up over
    micro-batches and ranks. They appear in metrics.jsonl as `objective/<name>`.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor | tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


class Objective(Protocol):
    """A user's objective: a function of a module, called for every micro-batch with the configuration's arguments."""

    def __call__(self, inputs: ObjectiveInputs, /, **arguments: Any) -> Tensor | ObjectiveOutput: ...


def objective_problem(part: object, arguments: Mapping[str, Any]) -> str:
    """Return why an object cannot be an objective with these arguments, or ""."""
    if inspect.isclass(part) or not callable(part):
        return "is not a function; an objective is a function of one ObjectiveInputs and keyword arguments"
    if inspect.iscoroutinefunction(part):
        return "is async; an objective is called inside the training step and cannot wait"
    return call_problem(part, ("inputs",), arguments)


def load_objective(extension: Extension) -> Objective:
    """Return the function that `objective.function` names, bound to its arguments. Raises ExtensionError."""
    found = load(extension.name)
    if problem := objective_problem(found, extension.arguments):
        raise ExtensionError(f"{extension.name} {problem}")
    return partial(found, **extension.arguments)


def function_loss(function: Objective, inputs: ObjectiveInputs, objective: PolicyObjective) -> PolicyLossOutput:
    """This micro-batch's share of the loss by a user's function, aggregated as `objective` says.

    Raises TypeError or ValueError when the function's output is not as `ObjectiveOutput` describes.
    """
    output = function(inputs)
    output = output if isinstance(output, ObjectiveOutput) else ObjectiveOutput(output)
    _check_output(output, inputs)
    layout = SequenceBounds.of(inputs.log_probs, inputs.cu_seqlens)
    _, trained = layout.masks(inputs.response_mask, inputs.loss_mask)
    per_token = None
    if output.loss.dim():
        per_token = torch.where(trained, output.loss, 0.0)
        loss = (per_token * token_scale(trained, layout, objective, inputs.denominators)).sum()
    else:
        loss = output.loss
    with torch.no_grad():
        stats = _stats(loss, output, inputs, trained)
    return PolicyLossOutput(loss.to(inputs.log_probs.dtype), per_token, stats)


def _check_output(output: ObjectiveOutput, inputs: ObjectiveInputs) -> None:
    loss, shape = output.loss, inputs.log_probs.shape
    if not isinstance(loss, Tensor):
        raise TypeError(f"objective.function returned {type(loss).__name__}; expected a tensor or ObjectiveOutput")
    if loss.shape not in (shape, ()):
        found = list(loss.shape)
        raise ValueError(f"objective.function returned a loss of shape {found}; expected {list(shape)} or a scalar")
    if inputs.log_probs.requires_grad and not loss.requires_grad:
        raise ValueError("objective.function returned a loss that does not depend on log_probs: nothing is trained")


def _stats(loss: Tensor, output: ObjectiveOutput, inputs: ObjectiveInputs, trained: Tensor) -> LossStats:
    d = token_log_ratio(inputs.log_probs, inputs.old_log_probs, inputs.response_mask)
    return stats_of(
        {
            "loss": loss,
            "loss_tokens": trained.sum(),
            "model_tokens": inputs.response_mask.sum(),
            "minus_d": -d.double().sum(),
        },
        {"abs_log_ratio": (d.abs(), inputs.response_mask)},
        kind="function",
        named={name: _sum_and_count(name, value, trained) for name, value in output.metrics.items()},
    )


def _sum_and_count(name: str, value: Tensor | tuple[Tensor | float, Tensor | float], trained: Tensor) -> Tensor:
    """float64 `[2]`."""
    if isinstance(value, tuple):
        parts = [torch.as_tensor(part, dtype=torch.float64, device=trained.device) for part in value]
        return torch.stack([part.detach() for part in parts])
    if value.shape != trained.shape:
        raise ValueError(
            f"objective.function: the metric {name!r} has shape {list(value.shape)}; "
            f"expected {list(trained.shape)} or a pair (sum, count)"
        )
    return torch.stack([torch.where(trained, value.detach().double(), 0.0).sum(), trained.sum().double()])
