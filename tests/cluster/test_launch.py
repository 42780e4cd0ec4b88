"""`ctpo launch` as a user types it: its own environment, the batch scripts, a job in a real Slurm, one without."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ctpo_launchers.environment import FOLDER
from tests.cluster.conftest import RECORDED
from tests.cluster.local_slurm import Slurm
from tests.cluster.packages import COMMAND
from tests.end_to_end.small_run import SMALL, Ctpo, records
from tests.support import children
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
GOLDEN = Path(__file__).parent / "golden"
WORD = [sys.executable, "-m", "ctpo_megatron.cli", "launch"]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")


def launch(ctpo: Ctpo, *words: str, deadline_s: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `ctpo launch`; the first call makes its environment."""
    return children.run(
        [*WORD, *words],
        directory=ctpo.directory,
        environment=ctpo.environment | environment,
        deadline_s=max(deadline_s, 600 if not (FOLDER / "requirements.sha256").exists() else 0),
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nodes_1", ("--nodes", "1")),
        ("nodes_2", ("--nodes", "2")),
        ("nodes_8", ("--nodes", "8")),
        ("container", ("--nodes", "2", "--cluster", "slurm_container")),
    ],
)
def test_a_dry_run_prints_the_script_alone_and_it_is_clean(ctpo: Ctpo, name: str, options: tuple[str, ...]) -> None:
    done = launch(ctpo, CONFIG, "--dry-run", *options, "run.name=golden")
    assert done.returncode == 0, done.stderr
    script = re.sub(r"-[0-9a-f]{8}\.yaml", "-DIGEST.yaml", done.stdout).replace(str(ctpo.directory), "/home/me/project")
    assert script == (GOLDEN / f"{name}.sh").read_text()
    assert not (ctpo.directory / "runs" / "golden").exists()


@pytest.mark.parametrize(
    "script", [*sorted(GOLDEN.glob("*.sh")), Path(__file__).parent / "job.sh"], ids=lambda p: p.stem
)
def test_scripts_are_clean_to_shellcheck(script: Path) -> None:
    assert shutil.which("shellcheck"), COMMAND
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 0, done.stdout


def test_what_is_wrong_is_said_before_anything_is_submitted(ctpo: Ctpo) -> None:
    for words, message in {
        (CONFIG, "--dry-run", "policy.dtyp=x"): "policy.dtyp",
        (CONFIG, "--dry-run", "--cluster", "nowhere"): "there are local, slurm_container, slurm_example",
        (CONFIG, "--dry-run", "checkpoint.grace_s=600"): "raise signal_s",
        (CONFIG, "--executor", "local", "--cluster", "slurm_example"): "is a file for --executor slurm",
    }.items():
        done = launch(ctpo, *words)
        assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


def test_the_local_executor_runs_two_ranks(ctpo: Ctpo) -> None:
    cluster = ctpo.directory / "here.yaml"
    cluster.write_text(f"executor: local\njob_dir: {ctpo.directory}/jobs\n")
    options = ("--executor", "local", "--cluster", str(cluster), "placement.trainer_gpus=2", "run.name=local")
    done = launch(ctpo, CONFIG, *SMALL, *options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert [record["step"] for record in records(ctpo.directory / "runs" / "local")] == [0, 1, 2, 3]
    assert "memory/rank_1_peak_mib" in records(ctpo.directory / "runs" / "local")[-1]


def test_the_local_executor_runs_two_nodes_on_a_recording_and_gives_their_status(ctpo: Ctpo, recorded: Path) -> None:
    cluster = ctpo.directory / "here.yaml"
    cluster.write_text(f"executor: local\njob_dir: {ctpo.directory}/jobs\n")
    options = ("--executor", "local", "--nodes", "2", "--cluster", str(cluster), f"rollout.replay={recorded}")
    done = launch(ctpo, CONFIG, *SMALL, *RECORDED, *options, "run.name=local_nodes")
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert [record["step"] for record in records(ctpo.directory / "runs" / "local_nodes")] == list(range(7))
    broken = launch(ctpo, CONFIG, *SMALL, *RECORDED, *options, "run.name=local_nodes", "run.steps=7")
    assert broken.returncode in (1, 2), (broken.stdout + broken.stderr)[-8000:]


def test_a_job_is_submitted_to_slurm_asked_for_and_cancelled(ctpo: Ctpo, slurm: Slurm) -> None:
    cluster = ctpo.directory / "slurm.yaml"
    settings = {"executor": "slurm", "job_dir": f"{ctpo.directory}/jobs", "account": "me", "python": sys.executable}
    cluster.write_text(yaml.safe_dump({**settings, "time": "00:20:00", "mem": "2000", "env": {"OMP_NUM_THREADS": "1"}}))
    known = {"SLURM_CONF": slurm.environment["SLURM_CONF"], "PATH": slurm.environment["PATH"]}
    done = launch(
        ctpo, CONFIG, *SMALL, "--nodes", "2", "--cluster", str(cluster), "run.name=submitted", "sft.steps=4000", **known
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = launch(ctpo, "status", "--cluster", str(cluster), **known).stdout.split()
    job = shown[0]
    assert shown[1] in ("PENDING", "RUNNING")
    output = "no output"
    slurm.until(job, "RUNNING", seconds=60)
    for _ in range(120):
        output = launch(ctpo, "logs", job, "--cluster", str(cluster), **known).stdout
        if "SFT" in output or "sft" in output:
            break
    assert "rank" in output or "sft" in output.lower(), output
    assert launch(ctpo, "cancel", job, "--cluster", str(cluster), **known).returncode == 0
    slurm.until(job, "CANCELLED", seconds=180)


def test_a_check_of_two_nodes_here_names_what_is_wrong_and_what_carried_tensors(ctpo: Ctpo, recorded: Path) -> None:
    cluster = ctpo.directory / "here.yaml"
    cluster.write_text(f"executor: local\njob_dir: {ctpo.directory}/jobs\n")
    options = ("--executor", "local", "--nodes", "2", "--cluster", str(cluster), "--check")
    words = (*SMALL, f"rollout.replay={recorded}", "eval.every=0", "run.name=checked")
    done = launch(ctpo, CONFIG, *words, *options, deadline_s=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    said = done.stdout + done.stderr
    for text in ("Check of the job: no training", "2 ranks: an all-reduce of 16 MiB", "gloo over lo, on CPUs", "ready"):
        assert text in said
    assert not (ctpo.directory / "runs" / "checked").exists()
    gone = launch(ctpo, CONFIG, *words, "sandbox.url=http://127.0.0.1:9", *options, deadline_s=900)
    assert gone.returncode == 2 and "127.0.0.1:9 does not answer" in gone.stdout + gone.stderr


def test_a_check_in_slurm_waits_and_shows_one_table(ctpo: Ctpo, slurm: Slurm, recorded: Path) -> None:
    cluster = ctpo.directory / "slurm_check.yaml"
    settings = {"executor": "slurm", "job_dir": f"{ctpo.directory}/jobs", "account": "me", "python": sys.executable}
    cluster.write_text(yaml.safe_dump({**settings, "mem": "2000", "env": {"OMP_NUM_THREADS": "1"}}))
    known = {"SLURM_CONF": slurm.environment["SLURM_CONF"], "PATH": slurm.environment["PATH"]}
    words = (
        *SMALL,
        f"rollout.replay={recorded}",
        "eval.every=0",
        "run.name=slurm_checked",
        "--nodes",
        "2",
        "--cluster",
        str(cluster),
    )
    done = launch(ctpo, CONFIG, *words, "--check", deadline_s=900, **known)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert done.stdout.count("Check of the job: no training") == 1
    assert "gloo over lo, on CPUs" in done.stdout and "node 1 (" not in done.stderr
