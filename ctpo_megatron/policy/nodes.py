"""RMSNorm, rotary embedding and gathers of packed rows, each as one node of the autograd graph.

Composed of torch's operations, each would be several nodes, and every node reads and writes all rows. That is slower on
a CPU (benchmarks/results/nodes.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x `[..., H]` / sqrt(mean(x^2) + eps) * weight `[H]`, of x's dtype; computed in float32."""
    return _node(_RMSNorm, x, weight, eps)


def rotate(t: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rows t `[n, h, d]` with their pairs (i, i + d/2) rotated by angles of this cosine and sine, `[n, 1, d/2]`."""
    return _node(_Rotation, t, cosine, sine)


def take_rows(t: torch.Tensor, at: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Rows `at` of t `[n, ...]`. back: `[n]`, the index in `at` from which each row of t gets its gradient."""
    return _node(_Rows, t, at, back)


def gather_rows(t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rows `at` of t `[n, ...]`, which may come several times: their gradients add up in float32, in a fixed order."""
    return _node(_GatheredRows, t, at)


def _node(function: type[torch.autograd.Function], *inputs: Any) -> torch.Tensor:
    apply: Any = function.apply
    found: torch.Tensor = apply(*inputs)
    return found


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, wide = x.float(), weight.float()
        mean_square = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(rows.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(rows, scale).mul_(wide).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        rows, grad, scale = x.float().reshape(-1, width), grads[0].float().reshape(-1, width), scale.reshape(-1)
        product, wide = grad * rows, weight.float()
        along = torch.mv(product, wide).mul_(scale.pow(3)).div_(-width)
        grad_weight = torch.mv(product.t(), scale)
        grad_x = torch.mul(grad, wide, out=product).mul_(scale[:, None]).addcmul_(rows, along[:, None])
        return grad_x.view_as(x).to(x.dtype), grad_weight.to(weight.dtype), None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turned(t, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turned(grads[0], cosine, -sine), None, None


def _turned(t: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = t.chunk(2, dim=-1)
    turned = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(first, cosine, out=left).sub_(second * sine)
    torch.mul(second, cosine, out=right).add_(first * sine)
    return turned


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, at: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return t.index_select(0, at)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(at)
        ctx.count, ctx.dtype = t.shape[0], t.dtype
        return t.index_select(0, at)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (at,), grad = ctx.saved_tensors, grads[0]
        total = grad.new_zeros(ctx.count, *grad.shape[1:], dtype=torch.promote_types(grad.dtype, torch.float32))
        if total.is_cuda:  # there `index_add_` adds in any order, and this sorts
            total.index_put_((at,), grad.to(total.dtype), accumulate=True)
        else:
            total.index_add_(0, at, grad.to(total.dtype))
        return total.to(ctx.dtype), None
