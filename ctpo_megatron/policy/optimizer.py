"""AdamW and its schedules, as megatron-core builds them."""

from __future__ import annotations

import math

import torch
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.policy import device
from ctpo_megatron.policy.model import DTYPES, BuiltModel

_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}


def build_optimizer(
    model: BuiltModel, policy: PolicyConfig, config: OptimizerConfig, total_steps: int
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """Optimizer with fresh state and its schedule over `total_steps` optimizer steps.

    By default megatron excludes one-dimensional parameters and biases from weight decay.
    """
    dtype = DTYPES[policy.dtype]
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=policy.use_distributed_optimizer,
        ),
        list(model.wrapped),
        config_overrides=None if config.weight_decay_of == "matrices" else {},
    )
    if not device.CUDA:  # on CUDA it needs its step count on the device; a restored checkpoint has it on the host
        for group in optimizer.param_groups:
            group["fused"] = True
    steps = max(total_steps, config.warmup_steps + 1)
    decaying = max(1, round(steps * config.decay_fraction))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style=_STYLES[config.schedule],
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        # A resumed run follows its own configuration, not the values stored in the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=decaying,
        lr_wsd_decay_style="linear",
    )
    return optimizer, scheduler


def learning_rate(optimizer: ChainedOptimizer) -> float:
    """The rate that the next step uses."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def gradient_norm(optimizer: ChainedOptimizer) -> float:
    """L2 norm of the accumulated gradients over all ranks, before clipping; they are then ready for `apply_gradients`.

    Together with `apply_gradients` this is megatron's `ChainedOptimizer.step`, which does not check the norm first.
    Collective.
    """
    overflow = optimizer.prepare_grads()
    return math.inf if overflow else float(optimizer.get_grad_norm())


def apply_gradients(optimizer: ChainedOptimizer, norm: float) -> None:
    """Clip the gradients by their global norm and step. Collective."""
    for part in optimizer.chained_optimizers:
        if part.config.clip_grad > 0 and (parameters := part.get_parameters()):
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
    if not optimizer.step_with_ready_grads():
        raise RuntimeError("megatron's optimizer refused to step")
