"""The square root of the kernels, which is written out: as exact as the hardware's reciprocal root allows."""

from __future__ import annotations

import numpy as np
import pytest


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, rounded once: long double holds the product and the sum (64 bits) of these."""
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_every_position_gets_the_root_that_ieee_demands(off: int) -> None:
    """`rsqrt.approx.ftz.f32` errs by less than 2 units in the last place (2^-22.9 relative, PTX ISA)."""
    t = np.arange(1, 1 << 18, dtype=np.float32)
    inverse = (1.0 / np.sqrt(t.astype(np.float64))).astype(np.float32)
    for _ in range(abs(off)):
        inverse = np.nextafter(inverse, np.float32(np.sign(off) * np.inf))
    root = t * inverse
    root = fma(fma(-root, root, t), inverse * np.float32(0.5), root)
    assert np.array_equal(root, np.sqrt(t))
