"""Fixtures: run a test on a backend, Triton meaning its interpreter (see tests/conftest.py), and watch every launch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.harness import observed, poisoned_memory
from tests.support.backends import use_backend


def _obstacle() -> str | None:
    """Why the interpreter cannot run here; defines our kernels for it otherwise, before any test could do it first."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available():
        return "triton compiles for the GPU in this process and cannot interpret too"
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from ctpo_kernels import layer_triton, loss_triton, rows_triton  # noqa: F401
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return None


OBSTACLE = _obstacle()


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton backend, interpreted, for everything on the CPU."""
    if OBSTACLE is not None:
        pytest.skip(OBSTACLE)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with use_backend("triton"):
        yield


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend in turn; its name."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
        yield "triton"
    else:
        with use_backend("torch"):
            yield "torch"


@pytest.fixture(autouse=True)
def harness() -> Iterator[None]:
    """All tests: programs in a shuffled order, races and accesses outside of arguments found, fresh memory poisoned."""
    with poisoned_memory(), observed() if OBSTACLE is None else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)
