"""A private Ray ends at once and leaves nothing; when its own processes die, the driver continues and finds out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.deadlines import scaled

_DRIVER = """
import json, logging, os, sys, time
import multiprocessing.resource_tracker as tracker
import psutil, ray
from ctpo_megatron.base.processes import wait_for
from ctpo_megatron.engines import RayRuntime
logging.basicConfig(format="%(message)s")
killed, seconds, limit_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
runtime = RayRuntime(1)
runtime.started.result(limit_s)
class Engine:
    def answer(self): return bytes(20 << 20)
engine = ray.remote(Engine).options(num_cpus=1).remote()
ray.get(engine.answer.remote())
family = [each for each in psutil.Process().children(recursive=True) if each.pid != tracker._resource_tracker._pid]
running = [each for each in family if each.status() != psutil.STATUS_ZOMBIE]
idle = [each.pid for each in running if any(word.endswith("monitor.py") for word in each.cmdline())]
assert len(running) > 3 and not idle, idle
answers = 0
if killed:
    [victim] = [each for each in family if each.name() == killed]
    victim.kill()
    assert runtime.lost.result(limit_s) == f"Ray's {killed} (process {victim.pid}) died"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.5)
        answers += len(ray.get(engine.answer.remote(), timeout=60)) == 20 << 20
began = time.monotonic()
runtime.close()
took_s = time.monotonic() - began
left = [process.name() for process in wait_for(family, 5)]
print(json.dumps([len(family), answers, took_s, left, os.path.exists(runtime.folder)]))
"""
LONG = 20.0
"""Longer than Ray's own limits, of 10 to 15 s."""


@pytest.mark.parametrize(
    ("killed", "seconds"),
    [
        ("", 0.0),
        ("gcs_server", 1.0),
        pytest.param("gcs_server", LONG, marks=pytest.mark.slow),
        pytest.param("raylet", LONG, marks=pytest.mark.slow),
    ],
)
def test_a_driver_outlives_its_ray_and_ends_it_at_once(killed: str, seconds: float) -> None:
    """Engines answer without GCS and raylet; they, and Ray's agents, would outlive the driver for minutes."""
    command = [sys.executable, "-c", _DRIVER, killed, str(seconds), str(scaled(60))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(240), check=False)
    assert done.returncode == 0, done.stderr
    family, answers, took_s, left, folder = json.loads(done.stdout.splitlines()[-1])
    assert family >= 5 and (left, folder) == ([], False)  # GCS, raylet, its two agents, and the engine
    assert bool(answers) == bool(killed)
    assert killed or took_s < scaled(3)  # Ray itself takes a second for each
