"""Launches the Triton kernels of a transformer layer; what they compute is described in `layer`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ctpo_kernels import dispatch
from ctpo_kernels import layer_kernels as kernels

# (BLOCK, num_warps): eight numbers a thread, which are 16 bytes of 16-bit values.
SWIGLU = (1024, 4)
ROTARY = (1024, 4)
"""Pairs of a program at a time."""


def swiglu(x: Tensor) -> Tensor:
    """`layer.swiglu` in one launch."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    _by_columns(kernels.swiglu_kernel, width, x, out)
    return out


def swiglu_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of x in one launch."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _by_columns(kernels.swiglu_grad_kernel, x.shape[-1] // 2, x, grad.contiguous(), out)
    return out


def _by_columns(kernel: triton.JITFunction, width: int, x: Tensor, *others: Tensor) -> None:
    if x.numel():
        blocks = triton.cdiv(width, SWIGLU[0])
        programs = x.numel() // (2 * width) * blocks
        dispatch.launch(kernel, programs, x, *others, width, blocks, BLOCK=SWIGLU[0], num_warps=SWIGLU[1])


def rotated(t: Tensor, cosine: Tensor, sine: Tensor, *, inverse: bool) -> Tensor:
    """`layer.rotate`, or its inverse, in one launch."""
    rows, heads, width = t.shape
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    if t.numel():
        t = t if t.stride(-1) == 1 else t.contiguous()
        pairs = int(triton.next_power_of_2(width // 2))
        dispatch.launch(
            kernels.rotary_kernel,
            rows,
            t,
            t.stride(0),
            t.stride(1),
            cosine.contiguous(),
            sine.contiguous(),
            out,
            heads,
            width // 2,
            -1.0 if inverse else 1.0,
            HEADS=min(int(triton.next_power_of_2(heads)), max(1, ROTARY[0] // pairs)),
            HALF=pairs,
            num_warps=ROTARY[1],
        )
    return out
