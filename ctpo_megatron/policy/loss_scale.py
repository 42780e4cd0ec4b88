"""The loss scale of float16: backward passes run on a larger loss, so that small gradients are not 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

SMALLEST = 1.0
WINDOW = 1000
HYSTERESIS = 2


class LossScale(DynamicGradScaler):  # type: ignore[misc] # megatron-core has no types
    """megatron-core's dynamic loss scale, one for all of its optimizers.

    The second optimizer step whose gradient overflows (`HYSTERESIS`) halves it, and so does each later one, until
    `WINDOW` steps in a row without any double it. Powers of two: only exponents change, so float32 gradients keep
    their bits.

    megatron-core gives dense and expert parameters an optimizer with a scale each, and multiplies the loss by the
    first. They would part when only one of them overflows. Optimizers therefore share this one, and `note` alone
    changes it, once a step, when all ranks agree.
    """

    def __init__(self, initial: float) -> None:
        self._initial = initial
        self.restart()

    def restart(self) -> None:
        """Forget everything, for a new phase of training."""
        super().__init__(
            initial_scale=self._initial,
            min_scale=SMALLEST,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=WINDOW,
            hysteresis=HYSTERESIS,
        )
        self.value = self._initial

    def of(self, loss: torch.Tensor) -> torch.Tensor:
        """What the backward pass begins with: megatron-core's `grad_scale_func`."""
        return cast(torch.Tensor, self._scale * loss)

    def update(self, found_inf: bool) -> None:
        """megatron-core's optimizers report what each of them found, of their own parameters: `note` decides."""

    def note(self, *, overflow: bool) -> None:
        """Follow an optimizer step: whether the gradient overflowed on any rank."""
        super().update(overflow)
        if overflow or self._growth_tracker == 0:  # otherwise it is the same, and reading it waits for the device
            self._read()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the initial scale of the configuration no longer matters."""
        super().load_state_dict(state_dict)
        self._read()

    def _read(self) -> None:
        """Keep the number on the host: reading it back for every micro-batch would wait for the device."""
        self.value = float(self._scale)


def overflowed(scale: LossScale | None, losses: Mapping[str, float], norms: Iterable[float]) -> bool:
    """Whether only the scale is to blame for a gradient that is not finite: the loss is, and a smaller scale exists.

    losses, norms: of all ranks, so that all agree.
    """
    if scale is None or scale.value <= SMALLEST or not all(map(math.isfinite, losses.values())):
        return False
    return not all(map(math.isfinite, norms))
