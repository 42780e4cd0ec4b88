"""Triton kernels with a mistake each; import under TRITON_INTERPRET=1."""

import triton
import triton.language as tl


@triton.jit
def neighbours_kernel(values, out, n, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Grid: blocks. Program p stores BLOCK values from p * STEP on: they overlap where STEP < BLOCK."""
    index = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(values + index, mask=index < n), mask=index < n)


@triton.jit
def carry_kernel(totals, n):
    """Grid: n. Every program adds to what the one before it stored."""
    program = tl.program_id(0)
    before = tl.load(totals + program - 1, mask=program > 0, other=0)
    tl.store(totals + program, before + 1)


@triton.jit
def past_the_end_kernel(values, out, n, BLOCK: tl.constexpr):
    """Grid: blocks. No mask: the last block passes the end."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(values + index))
