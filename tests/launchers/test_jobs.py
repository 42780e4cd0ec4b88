"""Jobs before NeMo Run has them: their arguments, their cluster, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pytest

from ctpo_launchers import LaunchError, executor, launch, task
from ctpo_launchers.clusters import Cluster, for_check
from ctpo_launchers.jobs import TEMPLATES, Launch, VerbJob
from ctpo_megatron import cli
from ctpo_megatron.config import load_config
from tests.support.deadlines import scaled
from tests.support.prefork import PYTHONPATH, ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def slurm(folder: Path) -> Cluster:
    return Cluster(executor="slurm", job_dir=str(folder), account="me", python="/usr/bin/python3", signal_s=900)


def test_a_check_is_a_short_job_of_the_same_program_beside_the_run(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, ["run.name=mine"])
    training = Launch(config, slurm(tmp_path), 2, tmp_path)
    check = Launch(config, for_check(slurm(tmp_path)), 2, tmp_path, check=True)
    assert [text for text in check.arguments() if text not in training.arguments()] == ["--check"]
    assert check.status_files == [tmp_path / f"runs/mine.nodes/check/node{rank}/status" for rank in (0, 1)]
    assert (check.name, check.grace_s) == ("mine-check", 0)
    assert (check.cluster.time, check.cluster.signal_s, check.cluster.retries) == ("00:15:00", 60, 0)


def test_a_command_is_run_where_it_was_typed(tmp_path: Path) -> None:
    """The command is `ctpo eval`, which refuses: it exists, and was reached."""
    words = ("eval", "a b", "--data", "x.parquet")
    arguments = VerbJob(words, slurm(tmp_path), tmp_path).arguments()
    for given, message in (
        (arguments, 'MODEL = "a b": is no model and no run'),
        (["--workdir", "/nowhere", "--", "eval"], "--workdir /nowhere: No such file or directory"),
    ):
        command, environment = [sys.executable, "-m", VerbJob.module, *given], os.environ | {"PYTHONPATH": PYTHONPATH}
        done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), env=environment)
        assert done.returncode == 2 and message in done.stderr


def test_a_command_reaches_the_launcher_word_for_word(launched: list[Sequence[str]]) -> None:
    words = ["runs/my run", "--data", "a;b.parquet", "-k", "4", "eval.top_p=0.9"]
    assert cli.main(["launch", "--executor", "local", "eval", "--", *words]) == 0
    (given,) = launched
    parser = launch.argparse.ArgumentParser()
    launch.add_arguments(parser)
    args = parser.parse_args(list(given))
    assert (args.config, args.overrides, args.executor) == ("eval", words, "local")


def test_arguments_that_the_command_refuses_are_refused_before(
    launched: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", "--executor", "local", "eval", "--", "runs/x", "--smaples", "4"])
    assert ended.value.code == 2 and "unrecognized arguments: --smaples 4" in capsys.readouterr().err
    assert launched == []


def test_a_check_asks_the_launcher_for_one(launched: list[Sequence[str]]) -> None:
    assert cli.main(["launch", QUICKSTART, "--check", "--executor", "local", "--no-check"]) == 0
    assert "--check" in launched[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("task('train', cluster=c)", "the configuration file comes next"),
        ("task('serve', 'x', cluster=c)", "known are train, eval"),
        ("task('train', 'my.yaml', cluster=c, nodes=2)", "a task of the local executor is one node program"),
        ("task('eval', 'runs/x', cluster=c, nodes=2)", "runs on one node"),
        ("executor('nowhere.yaml')", "nowhere.yaml"),
    ],
)
def test_a_wrong_request_is_said(call: str, message: str, tmp_path: Path) -> None:
    cluster = Cluster(executor="local", job_dir=str(tmp_path))
    with pytest.raises(LaunchError, match=re.escape(message)):
        eval(call, {"task": task, "executor": executor, "c": cluster})


@pytest.mark.parametrize("check", [True, False])
def test_a_check_is_never_requeued(check: bool) -> None:
    """srun ends the other tasks of a failed one and gives their 143, which else says: saved, continue."""
    template = jinja2.Template((TEMPLATES / "slurm.sh.j2").read_text(encoding="utf-8"))
    command = f"srun python -m ctpo_launchers.node {'--check ' if check else ''}-- my.yaml"
    script = template.render(srun_commands=[command], max_retries=3)
    assert ("scontrol requeue" in script) is not check and script.endswith('\nexit "$status"')
