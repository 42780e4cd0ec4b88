"""Stand-ins for the Adams of Transformer Engine and apex: what they keep, where, and from when on.

Both make their moments in the first step and count steps in the parameter group, as int. Transformer Engine 2.9 to 2.11
`pytorch/optimizers/fused_adam.py`, apex `optimizers/fused_adam.py`. Their update is AdamW's.
"""

from __future__ import annotations

from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,  # of megatron-core 0.19
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        assert adam_w_mode and not capturable

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, parameter.grad)

    def _step(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            self.initialize_state(parameter)
        # Their kernels work on both moments together and have no counter per parameter.
        assert state.keys() == {"exp_avg", "exp_avg_sq"}, sorted(state)
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
        first, second = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        divisor = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"] / first, divisor, value=-group["lr"])

    def initialize_state(self, parameter: torch.Tensor) -> None:
        self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)


class ApexAdam(FusedAdam):
    """Counts the steps of empty groups too."""

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        super().step(closure, grad_scaler)
        for group in self.param_groups:
            if not group["params"]:
                group["step"] = group.get("step", 0) + 1


def install(adam: str) -> None:
    """What importing megatron-core does where the library is: `torch`, `transformer_engine` or `apex`."""
    if adam == "torch":
        return
    chosen = FusedAdam if adam == "transformer_engine" else ApexAdam
    megatron_optimizer.Adam = distrib_optimizer.Adam = chosen
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_TE_OPTIMIZER = adam == "transformer_engine"
    distrib_optimizer.USING_APEX_OPTIMIZER = adam == "apex"
