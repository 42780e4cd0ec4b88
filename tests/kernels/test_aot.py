"""The compile gate: every kernel compiles for every architecture, and the gate reports what it should."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.kernels import aot
from tests.kernels.compiling import code, gate, quick_gate

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the gate wrote of one compilation of the default configurations, which it let pass."""
    folder = tmp_path_factory.mktemp("aot")
    done = quick_gate("--arch", "90", "--json", str(folder / "aot.json"), TRITON_CACHE_DIR=str(folder / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "aot.json"


def test_default_configurations_fit_hopper(compiled: Path) -> None:
    """Every configuration on every architecture: the slow test below."""
    rows = json.loads(compiled.read_text())["kernels"]
    assert {(row["kernel"], row["arch"]) for row in rows} == {(kernel, 90) for kernel in aot.REGISTERS}
    for row in rows:
        assert 16 <= row["registers"] <= row["limit"]
        assert row["spill_bytes"] == row["stack_bytes"] == 0
        assert (row["instructions"] > 0) == (row["kernel"] in aot.INSTRUCTIONS)


def test_a_token_of_the_loss_takes_240_instructions_at_most_on_sm_90(compiled: Path) -> None:
    """Both passes over a whole batch, and the one of a window, in the shortest span of 512 tokens: 16 a thread.

    Those of the default and of a limited weight.
    """
    counted: dict[str, list[float]] = {name: [] for name in aot.INSTRUCTIONS}
    for row in json.loads(compiled.read_text())["kernels"]:
        if row["kernel"] in counted and row["arch"] == 90:
            counted[row["kernel"]].append(row["instructions"] + row["other_instructions"] / 16)
    assert {name: len(values) for name, values in counted.items()} == {"span_totals_kernel": 1, "loss_kernel": 4}
    assert sum(max(values) for values in counted.values()) <= 240


@pytest.mark.slow
def test_every_configuration_fits_every_architecture(tmp_path: Path) -> None:
    done = gate(TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


# The gate with the reports of an earlier compilation in the place of a new one.
JUDGE = """
import dataclasses, json, sys
from benchmarks.kernels import aot

rows = json.load(open(sys.argv[1]))["kernels"]
names = [field.name for field in dataclasses.fields(aot.Report)]
aot.compile_all = lambda chosen, architectures, processes: [
    aot.Report(**{name: row[name] for name in names}) for row in rows if row["arch"] in architectures
]
sys.exit(aot.main(["--quick", "--arch", "90", *sys.argv[2:]]))
"""


def test_every_limit_that_is_exceeded_is_named_and_fails_the_gate(compiled: Path) -> None:
    done = code(JUDGE, str(compiled), "--limit", "merge_kernel=1", "--limit", "reduce_kernel=1")
    assert done.returncode == 1, done.stdout + done.stderr
    failures = done.stderr.splitlines()
    assert {line.split()[0] for line in failures} == {"merge_kernel", "reduce_kernel"}
    assert all("registers, limit 1" in line and "sm_90" in line for line in failures)


def test_a_kernel_outside_the_table_is_refused() -> None:
    added = (
        "from benchmarks.kernels import aot; from ctpo_kernels import loss_kernels as k; "
        "k.other_kernel = k.reduce_kernel; aot.launches(quick=True)"
    )
    done = code(added)
    assert done.returncode == 1
    assert "LookupError" in done.stderr and "other_kernel" in done.stderr
