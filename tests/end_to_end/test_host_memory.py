"""What a run really holds in memory on a CPU, against what doctor and the dry run say."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ctpo_megatron.config import Job, load_config, spec_for
from ctpo_megatron.plan.host import host_parts
from tests.end_to_end.small_run import Ctpo
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

MARK = "CTPO_TEST_HOST_MEMORY"
"""Environment variable that marks the processes of the run, also those with another parent."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_takes_what_is_said(tmp_path: Path) -> None:
    """Proportional set sizes of all its processes together, where they were largest."""
    path = str(ROOT / "configs" / "quickstart.yaml")
    overrides = ["run.steps=1", "sft.steps=5", "eval.before_training=false", "checkpoint.every=1"]
    config = load_config(path, overrides)
    expected = sum(part.whole for part in host_parts(config, Job(1, 1, 0), spec_for(config)))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ctpo_megatron.train", path, *overrides],
            env=Ctpo(tmp_path).environment | {MARK: str(tmp_path)},
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        most, deadline = 0, time.monotonic() + scaled(300)
        while process.poll() is None and time.monotonic() < deadline:
            most = max(most, sum(map(_proportional, psutil.process_iter())))
            time.sleep(1)
    if process.poll() is None:
        process.kill()
    assert process.wait(scaled(30)) == 0, (tmp_path / "log").read_text()[-4000:]
    assert 1 / 1.3 < most / expected < 1.3, f"{most / 2**30:.2f} GiB, and {expected / 2**30:.2f} GiB were expected"


def _proportional(process: psutil.Process) -> int:
    """Bytes of a process of the run, of shared pages its part; 0 for one that has ended, and for others."""
    try:
        if f"{MARK}=" not in (Path("/proc") / str(process.pid) / "environ").read_text(errors="replace"):
            return 0
        return int(process.memory_full_info().pss)
    except (psutil.Error, OSError):
        return 0
