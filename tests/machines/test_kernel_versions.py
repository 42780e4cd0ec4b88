"""The sandbox on other kernels than this machine's, with control groups of version 2, as root and as another user."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.machines.machine import ACCELERATED, SLOWNESS, Machine
from tests.machines.packages import CACHE, SUITES, kernel
from tests.support.deadlines import scaled

GUEST = Path(__file__).with_name("guest.sh")
BOOT_S, LEVELS_S, MEMORY_S, ALL_S = 60, 120, 300, 1800
STAGES = {"root-group": MEMORY_S, "container": MEMORY_S, "container-moved": MEMORY_S, "root": ALL_S, "user": ALL_S}
TESTS = ["attacks", "neighbours", "memory_groups"]
"""Of tests/sandbox, where the processor is emulated: what a kernel can change. All of them would take hours."""


@pytest.mark.machine
@pytest.mark.timeout(SLOWNESS * (BOOT_S + 2 * LEVELS_S + sum(STAGES.values())))
@pytest.mark.parametrize("suite", SUITES)
def test_the_sandbox_holds_on_the_kernel_of(suite: str, report: list[str]) -> None:
    results = CACHE / "results" / suite
    failures: list[str] = []
    tests = ["tests/sandbox"] if ACCELERATED else [f"tests/sandbox/test_{name}.py" for name in TESTS]
    command = f"{GUEST} {results} {sys.executable} {scaled(SLOWNESS):g} {' '.join(tests)}"
    with Machine(kernel(suite), results, command) as machine:
        report.append(f"\nLinux {machine.wait_for('booted.done', scaled(BOOT_S)).strip()} ({suite}); {results}")
        for name in ("levels", "levels-user"):
            status = machine.wait_for(f"{name}.done", scaled(LEVELS_S)).strip()
            assert status == "0", (results / f"{name}.log").read_text()
            report += _levels(name, results / f"{name}.log")
        for name, seconds in STAGES.items():
            status = machine.wait_for(f"{name}.done", scaled(seconds)).strip()
            assert status in "01", (results / f"{name}.log").read_text()
            failures += _counted(name, results / f"{name}.xml", report)
    assert not failures


def _levels(name: str, answers: Path) -> list[str]:
    said = json.loads(answers.read_text())
    return [f"  {name}: {level}: {reason or 'holds'}" for level, reason in said.items()]


def _counted(name: str, file: Path, report: list[str]) -> list[str]:
    """The tests that failed; how many did what, by the file that they are in, goes into the report."""
    counts: dict[str, Counter[str]] = {}
    failures = []
    for case in ElementTree.parse(file).iter("testcase"):
        outcome = next((found.tag for found in case if found.tag in ("failure", "error", "skipped")), "passed")
        place = case.attrib["classname"].removeprefix("tests.sandbox.test_")
        counts.setdefault(place, Counter())[outcome] += 1
        if outcome in ("failure", "error"):
            failures.append(f"{name}: {case.attrib['classname']}::{case.attrib['name']}")
    for place, count in counts.items():
        report.append(f"  {name}: {place}: " + ", ".join(f"{number} {outcome}" for outcome, number in count.items()))
    return failures
