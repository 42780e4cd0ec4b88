"""Commands that tests run: their output when they are late, and what they leave running."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from tests.support import children
from tests.support.deadlines import scaled

ANOTHER = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"


def ended(pid: int) -> bool:
    """Within a while; a zombie has."""
    end = time.monotonic() + scaled(30)
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_status_and_output() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = children.run([sys.executable, "-c", code], deadline_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_a_late_command_is_killed_with_its_children_and_its_output_is_shown() -> None:
    code = f"{ANOTHER}; sys.stdout.flush(); import time; time.sleep(600)"
    with pytest.raises(AssertionError, match="had not ended after") as caught:
        children.run([sys.executable, "-c", code], deadline_s=2)
    assert ended(int(str(caught.value).splitlines()[-1]))


def test_what_a_command_left_running_is_ended() -> None:
    code = ANOTHER.replace("600)'])", "600)'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)")
    done = children.run([sys.executable, "-c", code], deadline_s=60)
    assert ended(int(done.stdout))


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
