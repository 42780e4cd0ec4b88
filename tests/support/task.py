"""The quickstart's task in small, written once for all tests of a checkout."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.support.deadlines import scaled
from tests.support.prefork import PYTHONPATH, ROOT, SHARED, Client

SMALL_TASK = ("train_prompts=64", "heldout_prompts=16", "sft_conversations=640", "tokenizer_conversations=400")
_SOURCES = ROOT / "examples" / "toolmath"


def task_folder(*settings: str) -> Path:
    """The files of a task with these settings of `python -m examples.toolmath`."""
    digest = hashlib.sha256("\n".join(settings).encode())
    for source in sorted(_SOURCES.glob("*.py")):
        digest.update(source.read_bytes())
    folder = ROOT / "build" / "toolmath" / digest.hexdigest()[:16]
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of pytest want it, too
            write_task(folder, *settings)
    return folder


def write_task(folder: Path, *settings: str) -> None:
    """`python -m examples.toolmath folder settings`; forked by a server of test processes where there is one."""
    if SHARED in os.environ:
        from examples.toolmath.__main__ import main

        done = Client(os.environ[SHARED]).run(main, argv=["toolmath", str(folder), *settings], deadline_s=120)
        assert done.returncode == 0, done.stderr
        return
    command = [sys.executable, "-m", "examples.toolmath", str(folder), *settings]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=scaled(120), stdout=subprocess.DEVNULL)


def task_files(folder: Path) -> tuple[str, ...]:
    """Overrides that name the files of a task."""
    return (
        f"model.path={folder / 'model'}",
        f"data.train=[{folder / 'train.parquet'}]",
        f"data.eval=[{folder / 'heldout.parquet'}]",
    )


def sft_file(folder: Path) -> str:
    """The override that names its conversations, where a configuration has a section `sft`."""
    return f"sft.data=[{folder / 'sft.parquet'}]"
