"""Starts a script of this folder as a job of several ranks, and reads what its rank 0 wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Results = dict[str, dict[str, Any]]


def run_job(script: str, models_dir: Path, output: Path, ranks: int, scenarios: dict[str, dict[str, Any]]) -> Results:
    """Run a script's `main(models_dir, output, scenarios)` on `ranks` processes of one thread each; rank 0's output."""
    env = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}}
    paths = [str(ROOT), *(str(ROOT / folder) for folder in ("kernels", "sandbox", "launchers"))]
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*paths, env.get("PYTHONPATH", "")])}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    arguments = [script.removesuffix(".py"), str(models_dir), str(output), json.dumps(scenarios)]
    command = [sys.executable, *launcher, str(HERE / "start_scenario.py"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(output, weights_only=False)
