"""Ray on a node with pretended GPUs: the engines get theirs, and none of the trainer's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_megatron.base.cuda_environment import MAX_CONNECTIONS
from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("users", [None, "8"])
def test_engines_see_gpus_of_their_own(users: str | None) -> None:
    """In a process of its own: here another Ray may run. The job has GPUs 8 to 15 and trains on the first four.

    users: what the user has set CUDA_DEVICE_MAX_CONNECTIONS to. A value of the rank's own does not reach engines.
    """
    script = [sys.executable, "-m", "tests.engines.pretended_gpus"]
    environment = {name: value for name, value in os.environ.items() if name != MAX_CONNECTIONS}
    environment |= {} if users is None else {MAX_CONNECTIONS: users}
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=scaled(200), env=environment)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert [connections for _, connections in seen] == [users, users]
    first, second = (set(gpus.split(",")) for gpus, _ in seen)
    assert len(first) == len(second) == 2
    assert first | second == {"12", "13", "14", "15"}
