"""A temporary directory that will not do; CUDA without torch: what the build says, and a driver without a device."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ctpo_megatron.checks import devices as node_devices
from ctpo_megatron.checks import has_cuda_device, temporary_problem


def test_it_agrees_with_torch() -> None:
    assert has_cuda_device() == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("line", "expected"),
    [("cuda: Optional[str] = None", False), ("cuda: Optional[str] = '12.8'", True), ("cuda = '13.0'", True)],
)
def test_the_build_of_torch(line: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip: Optional[str] = None\n")
    assert (node_devices._built_for(tmp_path / "version.py") is not None) == expected


@pytest.mark.parametrize(("status", "devices", "expected"), [(0, 2, True), (0, 0, False), (100, 2, False)])
def test_what_the_driver_shows(status: int, devices: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(pointer: object) -> int:
        pointer._obj.value = devices  # type: ignore[attr-defined]
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: status, cuDeviceGetCount=count)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert node_devices.driver_shows_device() == expected


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not node_devices.driver_shows_device()


def test_a_temporary_directory_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters give each job a folder with a long name; a container's root may be read-only."""
    for length, fits in ((52, True), (53, False)):
        monkeypatch.setattr(tempfile, "tempdir", f"/{'x' * (length - 1)}")
        assert (temporary_problem() is None) == fits
    assert "has 53 characters" in str(temporary_problem())
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    monkeypatch.setenv("TMPDIR", "/none")
    assert str(temporary_problem()).startswith('TMPDIR = "/none": No usable temporary directory found in')
