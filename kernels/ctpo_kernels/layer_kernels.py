"""Triton kernels of a transformer layer: SwiGLU, its gradient, and rotary embedding. Sums of products are float32."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def swiglu_kernel(x, out, width, blocks, BLOCK: tl.constexpr):
    """Grid: rows * blocks. x `[rows, 2 * width]`, out `[rows, width]`: silu(left half) * right half."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * _sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_grad_kernel(x, grad, out, width, blocks, BLOCK: tl.constexpr):
    """Write the gradient of x. Grid: the same. grad `[rows, width]`, out `[rows, 2 * width]`."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    s = _sigmoid(gate)
    left = g * up * s * (1.0 + gate * (1.0 - s))
    tl.store(out + row * 2 * width + column, left.to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * 2 * width + width + column, (g * gate * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotary_kernel(
    t,
    row_stride,
    head_stride,
    cosine,
    sine,
    out,
    heads,
    half,
    direction,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Grid: rows. t, out `[rows, heads, 2 * half]`, out dense; cosine, sine `[rows, half]`.

    direction: 1.0, or -1.0 to turn back.
    """
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)[None]
    inside = pair < half
    c = tl.load(cosine + row * half + pair, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sine + row * half + pair, mask=inside, other=0.0).to(tl.float32) * direction
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        live = inside & (head < heads)
        source = t + row * row_stride + head * head_stride + pair
        target = out + (row * heads + head) * 2 * half + pair
        first = tl.load(source, mask=live, other=0.0).to(tl.float32)
        second = tl.load(source + half, mask=live, other=0.0).to(tl.float32)
        tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=live)
        tl.store(target + half, (second * c + first * s).to(out.dtype.element_ty), mask=live)
