"""The compile gate: every kernel compiles for every architecture, and the gate reports what it should."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_kernels import aot
from tests.support import children

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
PACKAGES = Path(aot.__file__).parents[1]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: this one may have been told to interpret the kernels."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": str(PACKAGES), "PYTHONWARNINGS": "ignore"} | environment
    return children.run([sys.executable, *arguments], environment=environ, deadline_s=280)


def gate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "ctpo_kernels.aot", *arguments, **environment)


def test_default_configurations_fit_every_architecture(tmp_path: Path) -> None:
    file = tmp_path / "aot.json"
    done = gate("--quick", "--json", str(file), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["kernels"]
    assert {(row["kernel"], row["arch"]) for row in rows} == {
        (kernel, arch) for kernel in aot.REGISTERS for arch in aot.ARCHITECTURES
    }
    for row in rows:
        assert 16 <= row["registers"] <= row["limit"]
        assert row["spill_bytes"] == row["stack_bytes"] == 0


@pytest.mark.slow
def test_every_configuration_fits_every_architecture(tmp_path: Path) -> None:
    done = gate(TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_limit_that_is_exceeded_is_named_and_fails_the_gate(tmp_path: Path) -> None:
    limits = ("--limit", "merge_kernel=1", "--limit", "reduce_kernel=1")
    done = gate("--quick", "--arch", "90", *limits, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    failures = done.stderr.splitlines()
    assert {line.split()[0] for line in failures} == {"merge_kernel", "reduce_kernel"}
    assert all("registers, limit 1" in line and "sm_90" in line for line in failures)


def test_a_kernel_outside_the_table_is_refused() -> None:
    added = (
        "from ctpo_kernels import aot, loss_kernels as k; k.other_kernel = k.reduce_kernel; aot.launches(quick=True)"
    )
    done = python("-c", added)
    assert done.returncode == 1
    assert "LookupError" in done.stderr and "other_kernel" in done.stderr


def test_spills_and_compiler_errors_are_failures() -> None:
    bad = aot.Report("tile_kernel", "some", 90, 4, registers=20, spill_bytes=8, stack_bytes=16, shared_bytes=1 << 20)
    assert [word for line in bad.failures(aot.REGISTERS) for word in ("spills 8", "16 bytes", "shared") if word in line]
    assert len(bad.failures(aot.REGISTERS)) == 3
    broken = aot.Report("tile_kernel", "some", 90, 4, error="CompilationError: no")
    assert broken.failures(aot.REGISTERS) == ["tile_kernel (some) on sm_90 does not compile: CompilationError: no"]


def test_the_interpreter_is_refused() -> None:
    done = gate("--quick", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr and "unset" in done.stderr


def test_a_machine_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SystemExit) as stopped:
        aot.main(["--quick"])
    assert stopped.value.code == 2
    assert "triton is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--arch", "75"], "8.0"), (["--limit", "no_kernel=3"], "no_kernel=3")]
)
def test_bad_arguments_are_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        aot.main(arguments)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err
