"""The experts that a mixture of experts in transformers sends tokens to."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


@torch.no_grad()
def taken(model: Any, ids: list[int]) -> NDArray[Any]:
    """Of all tokens but the last, `[len - 1, layers, choices]` in ascending order."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *each: found.append(each[2][2])) for layer in model.model.layers
    ]
    model(torch.tensor([ids[:-1]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).sort(dim=2).values.numpy()
