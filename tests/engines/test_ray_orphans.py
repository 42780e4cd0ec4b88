"""What a killed run's Ray leaves is ended by the next start, and nothing else is."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ctpo_megatron.base import ray_orphans
from ctpo_megatron.base.processes import wait_for
from tests.support.deadlines import scaled

_RUN = """
import sys, time
import psutil
from ctpo_megatron.engines import RayRuntime
runtime = RayRuntime(1, lambda gpus: None, timeout_s=float(sys.argv[1]))
while not runtime.is_up(): time.sleep(0.01)
below = psutil.Process().children(recursive=True)
print(runtime._folder, *(process.pid for process in below if process.name().endswith("Agent")), flush=True)
time.sleep(3600)
"""
_OTHER = """
import os, sys, time
from setproctitle import setproctitle
setproctitle(sys.argv[2])
files = [os.open(path, os.O_RDONLY) for path in ("/", "/tmp", sys.argv[1])]
print("ready", flush=True)
time.sleep(3600)
"""


@contextmanager
def started(*command: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A Python program, and the words of its first line."""
    with subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()
        finally:
            process.kill()


def test_agents_of_a_killed_run_are_ended_and_those_of_a_living_one_are_not() -> None:
    with started(_RUN, str(scaled(60))) as (run, (folder, *words)):
        agents = [psutil.Process(int(word)) for word in words]
        assert len(agents) == 2
        assert not {agent.pid for agent in agents} & set(ray_orphans.end_orphans())
        run.send_signal(signal.SIGKILL)
        run.wait()
        deadline = time.monotonic() + scaled(30)
        while any(parent.name() == "raylet" for agent in agents if (parent := agent.parent())):
            assert time.monotonic() < deadline, "the raylet did not end with the run"
            time.sleep(0.01)
        assert not {agent.pid for agent in agents} & set(ray_orphans.end_orphans())  # before the sweep
        shutil.rmtree(folder)
        assert {agent.pid for agent in agents} <= set(ray_orphans.end_orphans())
        assert len(agents) == 2 and wait_for(agents, scaled(10)) == []


@pytest.mark.parametrize("name", ["ray::Other", "tail"])
def test_processes_of_other_rays_and_readers_of_a_log_are_not_ended(tmp_path: Path, name: str) -> None:
    folder = tmp_path if name == "ray::Other" else Path("/tmp", f"{ray_orphans.PREFIX}{tmp_path.parent.name}-read")
    folder.mkdir(exist_ok=True)
    (folder / "log").touch()
    with started(_OTHER, str(folder / "log"), name) as (process, _):
        shutil.rmtree(folder)
        assert process.pid not in ray_orphans.end_orphans()
