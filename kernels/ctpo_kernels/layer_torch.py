"""What the kernels of a transformer layer compute, in plain torch.

In 16 bits each operation rounds here, and a kernel rounds once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(x: Tensor) -> Tensor:
    """x `[..., 2 F]` -> `[..., F]`."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of x `[..., 2 F]`, given the one of the result, `[..., F]`."""
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty_like(x)
    left, right = out.chunk(2, dim=-1)
    s = gate.sigmoid()
    torch.mul(grad, gate * s, out=right)
    torch.mul(grad * up, s * (1.0 + gate * (1.0 - s)), out=left)
    return out


def rotated(t: Tensor, cosine: Tensor, sine: Tensor, *, inverse: bool) -> Tensor:
    """Rows t `[n, h, d]` turned by the angles of cosine and sine `[n, 1, d/2]`; inverse: back."""
    sine = -sine if inverse else sine
    first, second = t.chunk(2, dim=-1)
    turned = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(first, cosine, out=left).sub_(second * sine)
    torch.mul(second, cosine, out=right).add_(first * sine)
    return turned
