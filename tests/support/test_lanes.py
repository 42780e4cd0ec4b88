"""Half of the test processes take the tests that wait, while there are some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from xdist.remote import Producer

from tests.support.lanes import WAITING, Lanes, waits
from tests.support.prefork import ROOT

BUSY, SLOW = "tests/config/test_a.py", "tests/sandbox/test_b.py"


class Node:
    """A test process, and the groups that it got."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.shutting_down = False
        self.got: list[str] = []
        self.tests: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.got += [self.tests[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def given(tests: list[str]) -> list[list[bool]]:
    """Whether the tests wait that each of five processes gets at first; each test is a group."""
    nodes = [Node(number) for number in range(5)]
    option = SimpleNamespace(tx=["popen"] * 5, loadscopereorder=False)
    config = SimpleNamespace(option=option, getvalue=lambda name: getattr(option, name), rootpath=ROOT)
    lanes = Lanes(cast(pytest.Config, config), Producer("tests", enabled=False))
    for node in nodes:
        node.tests = tests
        lanes.add_node(cast(Any, node))
        lanes.add_node_collection(cast(Any, node), tests)
    lanes.schedule()
    return [[waits(test) for test in node.got] for node in nodes]


def test_each_process_gets_tests_of_its_lane() -> None:
    tests = [f"{file}::test_{number}@{file}-{number}" for number in range(6) for file in (BUSY, SLOW)]
    assert given(tests) == [[False, False]] * 3 + [[True, True]] * 2


def test_a_process_without_tests_of_its_lane_gets_others() -> None:
    assert given([f"{BUSY}::test_{number}@{number}" for number in range(10)]) == [[False, False]] * 5


def test_names_of_tests_that_wait_are_those_of_files() -> None:
    missing = [name for name in WAITING if not [*(ROOT / "tests").glob(f"{name}*")]]
    assert missing == []
