"""Prepares Triton's interpreter before anything imports Triton, and leaves the environment as it was.

Triton decides at import whether its own library functions (tl.sum, tl.cumsum, ...) can be interpreted, so it must be
imported under TRITON_INTERPRET=1 once. Kernels are then interpreted if the variable is set where they are defined
(fixture `interpreter` of tests/kernels). The variable does not stay: child processes and other tests must not see it.
With a GPU at hand nothing is prepared: kernels that the GPU runs need the library functions as they are.
"""

from __future__ import annotations

import importlib.util
import os


def _import_interpretable_triton() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
        return
    import torch

    if torch.cuda.is_available():
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.language  # noqa: F401
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


_import_interpretable_triton()
