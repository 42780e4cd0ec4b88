"""Ray on a node with pretended GPUs: the engines get theirs, and none of the trainer's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_engines_see_gpus_of_their_own() -> None:
    """In a process of its own: here another Ray may run. The job has GPUs 8 to 15 and trains on the first four."""
    script = [sys.executable, "-m", "tests.engines.pretended_gpus"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=scaled(200))
    assert done.returncode == 0, done.stderr
    first, second = (set(gpus.split(",")) for gpus in json.loads(done.stdout.splitlines()[-1]))
    assert len(first) == len(second) == 2
    assert first | second == {"12", "13", "14", "15"}
