"""CUDA without torch: what its version file says, and a driver that shows no device or is not there."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ctpo_megatron.config import has_cuda_device, machine


def test_it_agrees_with_torch() -> None:
    assert has_cuda_device() == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("line", "expected"),
    [("cuda: Optional[str] = None", False), ("cuda: Optional[str] = '12.8'", True), ("cuda = '13.0'", True)],
)
def test_the_build_of_torch(line: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip: Optional[str] = None\n")
    assert machine._built_for_cuda(tmp_path / "version.py") == expected


@pytest.mark.parametrize(("status", "devices", "expected"), [(0, 2, True), (0, 0, False), (100, 2, False)])
def test_what_the_driver_shows(status: int, devices: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(pointer: object) -> int:
        pointer._obj.value = devices  # type: ignore[attr-defined]
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: status, cuDeviceGetCount=count)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert machine._driver_shows_device() == expected


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not machine._driver_shows_device()
