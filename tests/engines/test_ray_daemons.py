"""A private Ray ends at once and leaves nothing; when its own processes die, the driver continues and finds out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deadlines import scaled

_DRIVER = """
import json, logging, os, signal, sys, time
import psutil, ray
from ctpo_megatron.base.processes import wait_for
from ctpo_megatron.engines import RayRuntime
logging.basicConfig(format="%(message)s")
killed, seconds = sys.argv[1], float(sys.argv[2])
runtime = RayRuntime(1, lambda gpus: None, timeout_s=float(sys.argv[3]))
while not runtime.is_up(): time.sleep(0.001)
class Engine:
    def answer(self): return bytes(20 << 20)
engine = ray.remote(Engine).options(num_cpus=1).remote()
ray.get(engine.answer.remote())
pid = ray._private.worker._global_node.all_processes[killed][0].process.pid
below = psutil.Process().children(recursive=True)
named = [process for process in below if process.name().startswith("ray") and process.name() != "ray::IDLE"]
os.kill(pid, signal.SIGKILL)
began = time.monotonic()
while not runtime.lost(starting=True) and time.monotonic() < began + float(sys.argv[3]): time.sleep(0.001)
noticed_s = time.monotonic() - began
lost, head_lost = runtime.lost(starting=True), runtime.lost(starting=False)
answers = 0
while time.monotonic() < began + noticed_s + seconds:
    time.sleep(0.5)
    answers += len(ray.get(engine.answer.remote(), timeout=60)) == 20 << 20
runtime.close()
left = [process.name() for process in wait_for(named, 5)]
print(json.dumps([pid, noticed_s, lost, head_lost, answers, len(named), left]))
"""


def said(program: str, *arguments: object) -> str:
    """What a program writes that starts a private Ray, in a process of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(240), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _killed(kind: str, seconds: float) -> list[object]:
    """What the driver of a private Ray says `seconds` after one of its processes was killed."""
    answer: list[object] = json.loads(said(_DRIVER, kind, seconds, scaled(60)).splitlines()[-1])
    return answer


_STARTED = """
import json, os, sys, threading, time
import psutil
from ctpo_megatron.engines import RayRuntime
killed, later_s, limit_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
pids, told = [], []
def kill():
    while not pids:
        with_name = [child for child in psutil.Process().children() if child.name() == killed]
        pids.extend(child.pid for child in with_name)
    time.sleep(later_s)
    with_name[0].kill()
    told.append(time.monotonic())
runtime = RayRuntime(1, lambda gpus: None, timeout_s=limit_s)
threading.Thread(target=kill).start()
try:
    while not runtime.is_up(): time.sleep(0.001)
    said = "up"
except Exception as error:
    said = str(error)
noticed_s = time.monotonic() - told[0]
alive = {child for child in psutil.Process().children(recursive=True) if child.name() in ("gcs_server", "raylet")}
runtime.close()
closed_s = time.monotonic() - told[0] - noticed_s
left = [child.name() for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
print(json.dumps([pids[0], noticed_s, closed_s, said, left, os.path.exists(runtime._folder)]))
"""


@pytest.mark.parametrize(
    "killed, later_s",
    [
        ("gcs_server", 1.0),  # Ray waits for it for ever
        pytest.param("raylet", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_daemon_that_dies_while_ray_starts_ends_the_start(killed: str, later_s: float) -> None:
    answer = json.loads(said(_STARTED, killed, later_s, scaled(60)).splitlines()[-1])
    pid, noticed_s, closed_s, text, left, folder = answer
    name = {"gcs_server": "GCS", "raylet": "raylet"}[killed]
    assert text == f"Ray's {name} (process {pid}) died"
    assert noticed_s < scaled(2) and closed_s < scaled(5)
    assert left == [] and not folder


_UNPLACED = """
import os, signal, sys, time
from pathlib import Path
import psutil
from tests.engines.pool_helpers import Stage
stage = Stage(Path(sys.argv[1]))
while not stage.fleet._runtime.is_up():
    time.sleep(0.001)
next(child for child in psutil.Process().children() if child.name() == "raylet").kill()
began = time.monotonic()
try:
    stage.fleet.wait_ready()
except Exception as error:
    print(time.monotonic() - began, error)
stage.close()
"""


@pytest.mark.slow
def test_an_engine_that_has_no_process_yet_does_not_wait_for_a_dead_raylet(tmp_path: Path) -> None:
    written = said(_UNPLACED, tmp_path)  # Ray prints pages of its own
    line = re.search(r"^([\d.]+) Ray's raylet \(process \d+\) died$", written, re.M)
    assert line and float(line[1]) < scaled(10), written


PROCESSES = 4
"""Raylet, its two agents, and the engine."""
LONG = 20.0
"""Longer than Ray's own limits, of 10 to 15 s."""


@pytest.mark.parametrize("seconds", [1.0, pytest.param(LONG, marks=pytest.mark.slow)])
def test_a_driver_outlives_its_gcs(seconds: float) -> None:
    pid, noticed_s, lost, head_lost, answers, processes, left = _killed("gcs_server", seconds)
    assert lost == head_lost == f"Ray's GCS (process {pid}) died"
    assert isinstance(noticed_s, float) and noticed_s < scaled(1) and answers
    assert processes == PROCESSES and left == []


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.0, LONG])
def test_engines_answer_without_a_raylet(seconds: float) -> None:
    pid, noticed_s, lost, head_lost, answers, processes, left = _killed("raylet", seconds)
    assert lost == f"Ray's raylet (process {pid}) died" and head_lost == ""
    assert isinstance(noticed_s, float) and noticed_s < scaled(1)
    assert answers and processes == PROCESSES and left == []


_UP_AND_DOWN = """
import multiprocessing.resource_tracker as tracker, time
import psutil, ray
from ctpo_megatron.engines import RayRuntime
runtime = RayRuntime(1, lambda gpus: None, timeout_s=120.0)
while not runtime.is_up(): time.sleep(0.01)
ray.get(ray.remote(lambda: None).remote())
family = [each for each in psutil.Process().children(recursive=True) if each.pid != tracker._resource_tracker._pid]
head = len(ray._private.worker._global_node.all_processes)
began = time.monotonic()
runtime.close()
took_s = time.monotonic() - began
left = [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
print(head, len(family), len(left), took_s)
"""


def test_ray_ends_at_once_and_leaves_nothing() -> None:
    head, family, left, took_s = said(_UP_AND_DOWN).split()
    assert int(family) >= int(head) >= 4  # a second for each was lost
    assert int(left) == 0
    assert float(took_s) < scaled(3)
