"""Which implementation of the kernels runs inside of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from ctpo_kernels.dispatch import ENVIRONMENT, Backend


@contextlib.contextmanager
def use_backend(name: Backend | None) -> Iterator[None]:
    """Name a backend in the environment of this process; None leaves the choice to the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if name is None:
            patch.delenv(ENVIRONMENT, raising=False)
        else:
            patch.setenv(ENVIRONMENT, name)
        yield
