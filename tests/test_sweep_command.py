"""`ctpo sweep`: names, refusals, order, stop and failure, with runs that only record what they are asked for.

tests/end_to_end/test_sweep.py sweeps with real runs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctpo_megatron import cli
from ctpo_megatron.cli.grid import points_of
from tests.support import children
from tests.support.deadlines import awaited, scaled
from tests.support.prefork import PYTHONPATH, ROOT
from tests.support.task import SMALL_TASK, sft_file, task_files, task_folder
from tests.tracking.synthetic_run import write_run

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
COMMON = ("run.name=mine", "checkpoint.grace_s=1")
GRID = ("--grid", "run.seed=0,1,2")

RUN = """\
# Stands for a run: takes minus, "m", a module, the configuration and overrides. What each does, `script.json` says.
import json, os, signal, sys, time
from pathlib import Path

settings = dict(text.split("=", 1) for text in sys.argv[1:] if "=" in text)
name = settings["run.name"]

def happened(text):
    with open("events.txt", "a") as file:
        file.write(f"{text}\\n")

happened(f"start {name} {settings['run.root']} {settings['run.resume']} {settings['run.seed']}")
what = json.loads(Path("script.json").read_text()).get(name, 0)
if what == "wait":
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    happened(f"waiting {name} {os.getpid()}")
    until = time.monotonic() + 100
    while not asked and time.monotonic() < until:
        time.sleep(0.02)
    happened(f"saved {name} {signal.Signals(asked[0]).name}")
    what = 1  # as torchrun, which says nothing of the signal
sys.exit(what)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def files() -> tuple[str, ...]:
    return task_files(task_folder(*SMALL_TASK))


@pytest.fixture(scope="module")
def command(files: tuple[str, ...]) -> list[str]:
    """Of a sweep with little to check."""
    return ["sweep", QUICKSTART, *files, *COMMON, "sft=null", "data.eval=[]", "eval.every=0"]


def python_that_runs(text: str) -> Path:
    """A Python that runs this program, whatever module it is asked for; in the current folder."""
    Path("run.py").write_text(text)
    program = Path.cwd() / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S run.py "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture
def stand_in(folder: Path) -> Path:
    Path("script.json").write_text("{}")
    return python_that_runs(RUN)


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (
            {"objective.preset": ["ctpo", "grpo"], "run.seed": ["0", "1"]},
            ["ctpo-seed0", "ctpo-seed1", "grpo-seed0", "grpo-seed1"],
        ),
        ({"policy.optimizer.lr": ["1e-6", "3e-6"]}, ["lr1e-6", "lr3e-6"]),
        ({"policy.recompute": ["none", "full"]}, ["recompute_none", "recompute_full"]),
        ({"policy.optimizer.lr": ["1"], "sft.optimizer.lr": ["3"]}, ["policy.optimizer.lr1-sft.optimizer.lr3"]),
    ],
)
def test_names_are_made_of_what_differs_and_the_last_key_varies_fastest(
    grid: dict[str, list[str]], expected: list[str]
) -> None:
    assert list(points_of(grid)) == expected


VALUES = st.lists(st.text("ab01-._/ :e", min_size=1, max_size=60), min_size=2, max_size=4, unique=True)


@given(VALUES, VALUES)
@example(["a/b", "a:b"], ["0", "1"])
def test_every_run_has_a_name_of_its_own_that_a_directory_can_have(first: list[str], second: list[str]) -> None:
    points = points_of({"objective.preset": first, "a.seed": second})
    assert len(points) == len(first) * len(second)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in points)
    larger = points_of({"objective.preset": [*first, "z"], "a.seed": second[::-1]})
    assert larger.keys() >= points.keys()  # by the values alone, not by their places


def dry_run(capfd: pytest.CaptureFixture[str], command: list[str], *words: str) -> str:
    """What is refused; what is printed where nothing is."""
    status = cli.main([*command, *words, "--dry-run"])
    out, err = capfd.readouterr()
    assert status in (0, 2), err
    return err if status else out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--grid", "run.seed=0"], "--grid: no key has more than one value"),
        (["--grid", "run.seed=0,"], 'run.seed = "0,": has an empty value, or one twice'),
        (["--grid", "run.seed=0,1,0"], 'run.seed = "0,1,0": has an empty value, or one twice'),
        (["--grid", "run.seed=0,1", "run.seed=2,3"], 'run.seed = "2,3": is there twice'),
        (["run.seed=4", "--grid", "run.seed=0,1"], "run.seed: is an override, too"),
        (["--grid", "run.seed=0,1", "run.seed=4"], "run.seed: is an override, too"),
        (["--grid", "run.root=a,b"], "run.root: cannot vary"),
        (["--grid", "run.resume=true,auto"], "run.resume: cannot vary"),
        (["run.overwrite=true", "--grid", "run.seed=0,1"], "contradicts run.overwrite: true"),
        (["run.stepz=1", "--grid", "run.seed=0,1"], "run.stepz = 1: unknown key"),
    ],
)
def test_a_bad_grid_is_named(
    command: list[str], capfd: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    assert problem in dry_run(capfd, command, *words)


def test_all_mistakes_come_at_once_each_with_the_points_that_have_it(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    said = dry_run(capfd, command, "--grid", "run.root=a,b", "run.seed=1,1")
    assert "2 problems" in said and "run.root: cannot" in said and 'run.seed = "1,1"' in said
    grid = ("policy.mini_batch_prompts=4,5,6", "run.seed=0,1")
    lines = dry_run(capfd, command, "export.directory=..", "--grid", *grid).splitlines()
    assert "3 problems" in lines[0] and len(lines) == 4
    (five,) = (line for line in lines if "mini_batch_prompts = 5" in line)
    assert "[mini_batch_prompts5-seed0, mini_batch_prompts5-seed1]" in five
    (of_all,) = (line for line in lines if "export.directory" in line)
    assert "seed0" not in of_all


def test_a_dry_run_lists_the_runs_and_how_to_share_an_sft(
    files: tuple[str, ...], command: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shared = ["train", QUICKSTART, *files, *COMMON, sft_file(task_folder(*SMALL_TASK))]
    with_sft = ["sweep", *shared[1:]]
    said = dry_run(capfd, with_sft, "--grid", "objective.preset=ctpo,grpo", "policy.optimizer.lr=1e-4")
    assert said.splitlines()[0] == "2 runs in runs/mine: ctpo, grpo"
    once = shlex.join(["ctpo", *shared, "policy.optimizer.lr=1e-4", "run.name=sft", "run.steps=0"])
    assert f"To do it once: {once}\n" in said and "give the sweep: model.path=RUN/sft_model sft=null" in said
    assert "SFT" not in dry_run(capfd, with_sft, "--grid", "run.seed=0,1")
    assert "SFT" not in dry_run(capfd, with_sft, "--grid", "sft.steps=40,50")
    assert "SFT" not in dry_run(capfd, command, "--grid", "objective.preset=ctpo,grpo")
    assert not list(folder.iterdir())


def test_brackets_and_quotes_keep_their_commas(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    said = dry_run(capfd, command, "--grid", "policy.optimizer.betas=[0.9,0.95],[0.9,0.99]")
    assert re.fullmatch(r"2 runs in runs/mine: betas__0.9_0.95\.\w{6}, betas__0.9_0.99\.\w{6}\n", said)


def test_a_sweep_is_no_rank(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun, with --ranks N" in dry_run(capfd, command, *GRID)


def events(of: str = "") -> list[str]:
    """What the runs have done in this folder."""
    file = Path("events.txt")
    return [line for line in file.read_text().splitlines() if line.startswith(of)] if file.exists() else []


def test_all_points_are_checked_before_the_first_starts(
    command: list[str], stand_in: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ctpo_megatron.cli.sweep.sys.executable", str(stand_in))
    assert cli.main([*command, "--grid", "objective.preset=ctpo,grpi"]) == 2
    assert "grpi" in capfd.readouterr().err and not events()


def test_a_failed_run_does_not_end_the_sweep_and_the_others_are_compared(
    command: list[str], stand_in: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ctpo_megatron.cli.sweep.sys.executable", str(stand_in))
    Path("script.json").write_text('{"seed1": 3}')
    ended = write_run(Path("elsewhere"), steps=2)
    for seed in (0, 2):
        run = shutil.copytree(ended, Path("runs", "mine", f"seed{seed}"))
        (run / "config.yaml").write_text((ended / "config.yaml").read_text().replace("seed: 0", f"seed: {seed}"))
    assert cli.main([*command, *GRID]) == 1
    assert events() == [f'start seed{seed} "runs/mine" auto {seed}' for seed in range(3)]  # auto: nothing twice
    out, err = capfd.readouterr()
    assert "seed1 failed with exit status 3; the same command tries it again" in err
    assert "The page with curves and settings: runs/mine/comparison.html" in out
    assert re.search(r"ctpo +2 +2 +accuracy, toolmath", out), out  # two seeds, of two steps each


@contextmanager
def sweeping(command: list[str], stand_in: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep in a process of its own, whose second run waits for a signal."""
    Path("script.json").write_text('{"seed1": "wait"}')
    words = [*command, *GRID]
    program = (
        f"import sys; from ctpo_megatron import cli; sys.executable = {str(stand_in)!r}; sys.exit(cli.main({words}))"
    )
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    process = subprocess.Popen(
        [sys.executable, "-c", program], text=True, start_new_session=True, env=environment, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        children.end(process)
        process.communicate()


def wait_for(event: str) -> str:
    seen = awaited(lambda: events(event), 60)
    assert seen, f"no {event} in {events()}"
    return seen[0]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_current_run_and_the_sweep_with_it(
    command: list[str], stand_in: Path, number: signal.Signals, status: int
) -> None:
    with sweeping(command, stand_in) as process:
        wait_for("waiting seed1")
        process.send_signal(number)
        _, err = process.communicate(timeout=scaled(60))
    assert process.returncode == status, err
    assert "stopped in runs/mine/seed1; the same command continues" in err
    assert events()[-1] == f"saved seed1 {number.name}"


def test_a_killed_sweep_takes_its_run_along(command: list[str], stand_in: Path) -> None:
    with sweeping(command, stand_in) as process:
        wait_for("waiting seed1")
        process.kill()
        assert wait_for("saved") == "saved seed1 SIGTERM"
    assert not events("start seed2")


def test_a_run_that_is_stopped_by_others_stops_the_sweep(
    command: list[str], stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a job, where run.deadline stops it."""
    monkeypatch.setattr("ctpo_megatron.cli.sweep.sys.executable", str(stand_in))
    Path("script.json").write_text('{"seed0": 143}')
    assert cli.main([*command, *GRID]) == 143
    assert [event.split()[1] for event in events("start")] == ["seed0"]
