"""The end of a private Ray: at once, and nothing of it stays."""

from __future__ import annotations

import subprocess
import sys

from tests.support.deadlines import scaled

_UP_AND_DOWN = """
import multiprocessing.resource_tracker as tracker, time
import psutil, ray
from ctpo_megatron.engines.ray_runtime import RayRuntime
runtime = RayRuntime(1, lambda gpus: None)
runtime.wait(120)
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
    done = subprocess.run(
        [sys.executable, "-c", _UP_AND_DOWN], capture_output=True, text=True, timeout=scaled(180), check=False
    )
    assert done.returncode == 0, done.stderr
    head, family, left, took_s = done.stdout.split()
    assert int(family) >= int(head) >= 4  # a second for each was lost
    assert int(left) == 0
    assert float(took_s) < scaled(3)
