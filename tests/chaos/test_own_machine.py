"""Programs that need a machine of their own: what kills leave behind, and a short form of the long life."""

from __future__ import annotations

import pytest

from tests.chaos import machine
from tests.support import children
from tests.support.prefork import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _possible_here() -> None:
    if reason := machine.reason_against():
        pytest.skip(reason)


@pytest.mark.timeout(3600)
def test_after_ten_kills_of_each_kind_of_process_nothing_is_left() -> None:
    done = children.run(machine.command("tests.chaos.left_behind", "10"), directory=ROOT, deadline_s=3500)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


@pytest.mark.timeout(900)
def test_a_life_of_sixty_steps_with_eight_faults() -> None:
    short = ("--steps", "60", "--faults", "8", "--minutes", "14", "--inside")
    done = children.run(machine.command("tests.chaos.long_life", *short), directory=ROOT, deadline_s=880)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
