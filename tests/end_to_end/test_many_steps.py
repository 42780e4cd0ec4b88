"""What a run of many steps does to the memory of the machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.end_to_end.small_run import Ctpo, read
from tests.support.deadlines import awaited, scaled

EARLY, LATE, STEPS = 130, 390, 400
"""Between two saves: the processes that write one share the trainer's pages."""
GROWTH_MB = 40.0
"""Of a process. Those that grow with the steps grew by 60 and more."""
SETTINGS = (
    *("sft=null", "export.enabled=false", "tracking.report=false", "eval.every=50", "eval.prompts=4"),
    *("run.name=many", f"run.steps={STEPS}", "checkpoint.every=50", "checkpoint.keep_last=1"),
    *("rollout.max_response_tokens=64", "rollout.max_turn_tokens=32", "rollout.max_staleness=1"),
)


class Size(NamedTuple):
    """Of a process."""

    name: str
    mb: float
    files: int
    threads: int


Sizes = dict[int, Size]


def sizes(process: int) -> Sizes:
    """Of a process and all below it, by its number; the least of some looks, as much is freed between steps."""
    found: Sizes = {}
    for _ in range(8):
        for each in (psutil.Process(process), *psutil.Process(process).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                mb, name = each.memory_full_info().uss / 1e6, " ".join(each.cmdline())[:60]
                now = Size(name, mb, each.num_fds(), each.num_threads())
                before = found.get(each.pid, now)
                found[each.pid] = Size(name, *(min(pair) for pair in zip(now[1:], before[1:], strict=True)))
        time.sleep(0.5)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_process_grows_with_the_steps(tmp_path: Path) -> None:
    ctpo, log = Ctpo(tmp_path), tmp_path / "log"
    looks: list[Sizes] = []
    with log.open("w") as output:  # not forked from a process whose pages it would come to own one by one
        run = subprocess.Popen(
            ctpo.command(*SETTINGS),
            cwd=tmp_path,
            env=ctpo.environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        for step in (EARLY, LATE):
            told = f"[rl] step {step}/{STEPS}"
            awaited(lambda told=told: told in read(log) or run.poll() is not None, 900, every=0.5)
            assert told in read(log), read(log)[-4000:]
            looks.append(sizes(run.pid))
        assert run.wait(scaled(200)) == 0, read(log)[-4000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    early, late = looks
    assert len(late) <= len(early) + 1, "processes are left over"
    both = [each for each in early if each in late]
    changes = [
        (late[each].name, *(now - then for now, then in zip(late[each][1:], early[each][1:], strict=True)))
        for each in both
    ]
    assert len(changes) > 5
    grown = [change for change in changes if change[1] > GROWTH_MB or max(change[2:]) > 4]
    assert grown == [], changes
