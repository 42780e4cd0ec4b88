"""The same results of Triton's interpreter in half the time: what it makes anew for each operation is kept.

A kernel of ours is some thousand operations on few numbers each: nearly all the time goes into types and shapes.
"""

from __future__ import annotations

import builtins
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language.core as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install(patch: pytest.MonkeyPatch) -> None:
    """For as long as `patch` lasts."""
    overflow = TritonSemantic.binary_op_sanitize_overflow_impl
    block, dtype = tl.block_type.__init__, interpreter._get_np_dtype

    @cache
    def shape_of(sizes: builtins.tuple[int, ...]) -> builtins.tuple[Any, Any]:
        return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(builtins.tuple(type.shape) if type.is_block() else ())

    blocks: dict[Any, dict[str, Any]] = {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *tl._unwrap_shape(shape))
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = vars(self)
        vars(self).update(blocks[key], element_ty=element_ty)

    numpy_types: dict[str, np.dtype[Any]] = {}

    def numpy_type(kind: Any) -> np.dtype[Any]:
        if kind.name not in numpy_types:
            numpy_types[kind.name] = dtype(kind)
        return numpy_types[kind.name]

    def find_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        """A quarter of all operations, for an assertion that is not made without `debug`."""
        if self.builder.options.debug:
            overflow(self, lhs, rhs, operation)

    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
    patch.setattr(tl.tensor, "__init__", make_tensor)
    patch.setattr(tl.block_type, "__init__", make_block)
    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", find_overflow)
