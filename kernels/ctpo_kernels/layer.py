"""Parts of a transformer layer that torch computes in several operations: SwiGLU and rotary embedding.

Each is one node of the autograd graph, and on CUDA one launch in each direction.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctpo_kernels import dispatch, layer_torch


def swiglu(x: Tensor) -> Tensor:
    """Compute silu(a) * b of rows x = [a, b].

    x: `[..., 2 F]`, any float dtype, differentiable. Returns `[..., F]` of the same dtype. Saves x. Raises ValueError
    for rows of another size or dtype.
    """
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x must be floating-point [..., 2 F]; got {x.dtype} {list(x.shape)}")
    found: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]  # torch does not type `apply`
    return found


def rotate(t: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of every head.

    t: `[n, h, d]`, any float dtype, differentiable. cosine, sine: of the angle of each pair, `[n, 1, d/2]` of the same
    dtype, shared by the heads of a row. Returns `[n, h, d]`. Saves cosine and sine. Raises ValueError for other shapes
    or dtypes.
    """
    angles = (t.shape[0], 1, t.shape[-1] // 2) if t.dim() == 3 and t.shape[-1] % 2 == 0 else None
    if not t.is_floating_point() or any(each.shape != angles or each.dtype != t.dtype for each in (cosine, sine)):
        raise ValueError(
            f"t must be floating-point [n, h, d] with even d, cosine and sine [n, 1, d/2] of its dtype; got {t.dtype} "
            f"{list(t.shape)}, {cosine.dtype} {list(cosine.shape)}, {sine.dtype} {list(sine.shape)}"
        )
    found: Tensor = _Rotation.apply(t, cosine, sine)  # type: ignore[no-untyped-call]
    return found


def _backend(tensor: Tensor) -> ModuleType:
    if dispatch.choose(tensor) == "torch":
        return layer_torch
    from ctpo_kernels import layer_triton

    return layer_triton


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        found: Tensor = _backend(x).swiglu(x)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = _backend(x).swiglu_gradient(x, grads[0])
        return found


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        found: Tensor = _backend(t).rotated(t, cosine, sine, inverse=False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _backend(grads[0]).rotated(grads[0], cosine, sine, inverse=True), None, None
