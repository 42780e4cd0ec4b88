"""Runs of the quickstart for benchmarks of whole training steps: its start weights, made once, and the command."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from ctpo_megatron.config import load_config
from ctpo_sandbox import start_configured_server
from examples.toolmath import Task, write_task

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path.home() / ".cache" / "ctpo-megatron-benchmarks"
CONFIG = ROOT / "configs" / "quickstart.yaml"
RL_ONLY = (
    "sft=null",
    "data.eval=[]",
    "eval.every=0",
    "data.shuffle=false",
    "checkpoint.every=0",
    "export.enabled=false",
    "tracking.report=false",
    "run.overwrite=true",
)
"""Nothing but training steps, on the prompts in the order of the file."""
OLDER = {"prepare": "prepare=null"}
"""Sections of earlier commits' quickstart -> what a side of such a commit needs besides."""
_STEP_ZERO = ("run.steps=1", "data.eval=[]", "eval.every=0", "checkpoint.every=1", "tracking.report=false")


def train(*settings: str, root: Path = ROOT) -> list[str]:
    """The command of a run of the quickstart with these settings. root: the checkout whose quickstart it is."""
    config = root / CONFIG.relative_to(ROOT)
    return [sys.executable, "-m", "ctpo_megatron.cli", "train", str(config), *settings]


def environment(root: Path = ROOT) -> dict[str, str]:
    """Where the command finds the packages of a checkout, and users' parts in its `benchmarks/`."""
    return {"PYTHONPATH": ":".join(str(root / part) for part in (".", "answers", "kernels", "sandbox", "launchers"))}


def rl_only(root: Path) -> list[str]:
    """`RL_ONLY` as a checkout's configuration knows it."""
    sections = yaml.safe_load((root / CONFIG.relative_to(ROOT)).read_text(encoding="utf-8"))
    return [*RL_ONLY, *(setting for section, setting in OLDER.items() if section in sections)]


def start_weights(folder: Path) -> tuple[Path, Path]:
    """The quickstart's model after its supervised stage, and its training prompts.

    Made by the first call, in about two minutes, and kept in the folder. Raises subprocess.CalledProcessError.
    """
    model, run, task = folder / "start", folder / "quickstart", folder / "toolmath"
    write_task(Task(), task)
    if not model.exists():
        print("the quickstart's supervised stage ...", flush=True)
        files = [f"model.path={task / 'model'}", f"data.train=[{task / 'train.parquet'}]"]
        files += [f"sft.data=[{task / 'sft.parquet'}]", f"run.root={folder}", "run.overwrite=true"]
        _run(train(*files, "export.enabled=false", *_STEP_ZERO))
        export = [sys.executable, "-m", "ctpo_megatron.cli", "export", str(run / "checkpoints" / "step_000000")]
        _run([*export, "--output", str(model)])
    return model, task / "train.parquet"


@contextmanager
def sandbox(folder: Path) -> Iterator[str]:
    """Address of a server like the one that a run of the quickstart starts for itself. folder: of its log."""
    with start_configured_server(load_config(CONFIG).sandbox, folder / "sandbox.log") as server:
        yield server.url


def digest(model: Path) -> str:
    """Of the start weights, for a result file."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **environment()}, stdout=subprocess.DEVNULL)
