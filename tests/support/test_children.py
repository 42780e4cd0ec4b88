"""Commands that tests run: their output when they are late, and what they leave running."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import children
from tests.support.deadlines import scaled

pytestmark = pytest.mark.slow  # of the harness, which changes seldom

ANOTHER = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"


def test_a_late_command_is_killed_with_its_children_and_its_output_is_shown() -> None:
    code = f"{ANOTHER}; sys.stdout.flush(); import time; time.sleep(600)"
    with pytest.raises(AssertionError, match="had not ended after") as caught:
        children.run([sys.executable, "-c", code], deadline_s=2)
    assert children.has_ended(int(str(caught.value).splitlines()[-1]))


def test_what_a_command_left_running_is_ended() -> None:
    code = ANOTHER.replace("600)'])", "600)'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)")
    done = children.run([sys.executable, "-c", code], deadline_s=60)
    assert children.has_ended(int(done.stdout))


def test_a_process_that_is_gone_may_be_ended_again() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    children.end(process)


def test_deadlines_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTPO_TEST_SLOWNESS", "2.5")
    assert scaled(4) == 10
    monkeypatch.setenv("CTPO_TEST_SLOWNESS", "0")
    with pytest.raises(ValueError, match="must be a positive number"):
        scaled(4)
