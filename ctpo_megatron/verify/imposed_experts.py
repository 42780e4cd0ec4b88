"""Recorded experts in a model of transformers, for the oracle: not by the code that the trainer replays them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ctpo_megatron.data import Trajectory
from ctpo_megatron.data.tokens import ROUTER_CHOICES, further, recorded


@contextmanager
def imposed_experts(trajectory: Trajectory) -> Iterator[None]:
    """Within it, a forward pass over the tokens of a trajectory sends them to the experts that it has recorded, if any.

    Raises RuntimeError unless the model called `torch.topk` once in each layer.
    """
    choices = further(trajectory.tokens).get(ROUTER_CHOICES)
    if choices is None:
        yield
        return
    imposed = _Imposed(torch.from_numpy(choices.astype("int64")), torch.from_numpy(recorded(choices)))
    with imposed:
        yield
    if imposed.layer != choices.shape[1]:
        raise RuntimeError(f"{imposed.layer} routers of the model in transformers chose experts by torch.topk")


class _Imposed(TorchFunctionMode):
    """experts: `[T, layers, choices]`; known: bool `[T]`. Routers are called layer by layer."""

    def __init__(self, experts: Tensor, known: Tensor) -> None:
        super().__init__()
        self._experts, self._known, self.layer = experts, known, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return found
        experts = torch.where(self._known[:, None], self._experts[:, self.layer], found.indices)
        self.layer += 1
        return args[0].gather(1, experts), experts
