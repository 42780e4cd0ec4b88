"""Writes the stored run of this version: python -m tests.releases.make. A minute on two cores; at most 300 kB.

Two steps of a tiny model on the quickstart's task, with the checkpoint of the second. Later versions resume it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ctpo_megatron import __version__
from tests.end_to_end.small_run import SMALL, Ctpo
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT
from tests.support.task import task_files, write_task

FOLDER = Path(__file__).parent
LARGEST = 300_000
"""Bytes of one stored run."""
NAME = "stored"
SETTINGS = (
    *SMALL,
    *task_files(Path("task")),
    f"run.name={NAME}",
    "extensions.path=[]",
    "run.steps=2",
    "sft=null",
    "objective.entropy_coef=0.01",  # a gradient without a reward, so that the moments of the optimizer are not zero
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "policy.mini_batch_prompts=1",
    "checkpoint.every=2",
    "checkpoint.keep_last=1",
    "export.enabled=false",
)
TASK = (
    *("train_prompts=16", "heldout_prompts=4", "sft_conversations=64", "tokenizer_conversations=64"),
    *("model.hidden_size=16", "model.intermediate_size=32", "model.num_layers=1"),
    *("model.num_attention_heads=1", "model.num_key_value_heads=1"),
)
NEEDLESS = ("tensorboard", "logs", "figures", "report.html", "sft.parquet", "evaluation")
"""Files and folders that no resume reads."""


KEPT = ("version", "python", "packages")
"""Fields of environment.json that say nothing of the machine."""


def train(folder: Path, config: Path | str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`ctpo train` in a folder."""
    command = [sys.executable, "-m", "ctpo_megatron.train", str(config), *overrides]
    environment = Ctpo(folder).environment
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=scaled(1200))


def pack(run: Path, target: Path) -> None:
    """A run as an archive, without what is not read, and without names, paths and times of this machine."""
    record = run / "environment.json"
    facts = json.loads(record.read_text(encoding="utf-8"))
    record.write_text(json.dumps({name: facts[name] for name in KEPT if name in facts}), encoding="utf-8")

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return None if Path(member.name).name in NEEDLESS else member

    with tarfile.open(target, "w:xz", preset=9) as archive:
        archive.add(run, arcname=f"runs/{run.name}", filter=kept)
        archive.add(run.parents[1] / "task", arcname="task", filter=kept)


def main() -> int:
    """Exit status: 0, or 1 where the run fails or is too large."""
    target = FOLDER / f"{__version__}.tar.xz"
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder) / "task", *TASK)
        done = train(Path(folder), ROOT / "configs" / "quickstart.yaml", *SETTINGS)
        if done.returncode:
            print(done.stdout[-4000:] + done.stderr[-4000:], file=sys.stderr)
            return 1
        pack(Path(folder) / "runs" / NAME, target)
    print(f"{target}: {target.stat().st_size} bytes, at most {LARGEST}")
    return int(target.stat().st_size > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
