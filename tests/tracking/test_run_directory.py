"""A run directory is created once, and an earlier run is never lost by accident."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys

import pytest
import yaml

from ctpo_megatron import __version__
from ctpo_megatron.base.files import claim
from ctpo_megatron.config import ObjectiveConfig, load_config, resolved_objective
from ctpo_megatron.run import (
    RunDirectoryError,
    is_finished,
    open_run_directory,
    record_finish,
    take_over,
)
from tests.support.deadlines import scaled


def test_creates_the_directory_with_the_resolved_configuration(config_in):
    config = config_in()
    directory = open_run_directory(config)
    written = yaml.safe_load((directory / "config.yaml").read_text())
    assert written["rollout"]["samples_per_prompt"] == 8
    assert type(config)(**written) == config
    assert (directory / "environment.json").exists()


def test_the_objective_is_written_down_in_numbers(config_in):
    config = config_in(objective={"preset": "dapo", "clip_high": 0.3})
    directory = open_run_directory(config)
    line = "Objective: dapo: token ratio, window (0.8, 1.3) of r, dual 3, mean over tokens"
    text = (directory / "config.yaml").read_text()
    assert f"\n# {line}\nobjective:\n  preset: dapo\n" in text
    assert json.loads((directory / "environment.json").read_text())["objective"] == resolved_objective(config.objective)
    given = yaml.safe_load(text)["objective"]
    assert given["clip_high"] == 0.3 and given["ratio_mode"] is given["clip_low"] is given["loss_agg_mode"] is None


def test_another_preset_over_a_stored_configuration_is_all_of_that_preset(config_in):
    directory = open_run_directory(config_in(objective={"preset": "dapo"}))
    again = load_config(directory / "config.yaml", ["objective.preset=gspo"])
    assert resolved_objective(again.objective) == resolved_objective(ObjectiveConfig(preset="gspo"))


def test_a_resume_takes_on_the_objective_and_needs_no_comment(config_in, caplog):
    directory = open_run_directory(config_in())
    stored = directory / "config.yaml"
    stored.write_text("".join(line for line in stored.read_text().splitlines(True) if not line.startswith("#")))
    open_run_directory(config_in(run={"resume": True}))
    take_over(config_in(run={"resume": True}))
    assert "another value" not in caplog.text and not (directory / "config.previous.yaml").exists()
    assert "# Objective: ctpo: cumulative ratio, " in stored.read_text()
    take_over(config_in(run={"resume": True}, objective={"preset": "grpo"}))
    assert "# Objective: grpo: token ratio, " in stored.read_text()
    assert json.loads((directory / "environment.json").read_text())["objective"]["preset"] == "grpo"


@pytest.mark.parametrize("root", ["file", "n" * 300])
def test_a_root_that_cannot_be_written_to_is_named(config_in, tmp_path, root):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=rf"^run.root={tmp_path / root}: \[Errno .* Type run.root=DIR with"):
        open_run_directory(config_in(run={"root": str(tmp_path / root)}))


def test_an_existing_run_is_refused_with_what_to_type(config_in):
    open_run_directory(config_in())
    with pytest.raises(RunDirectoryError) as refused:
        open_run_directory(config_in())
    for remedy in ("run.overwrite=true", "run.name=other", "run.resume=true"):
        assert remedy in str(refused.value)


def test_auto_starts_what_is_not_there_and_resumes_what_is(config_in, caplog):
    directory = open_run_directory(config_in(run={"resume": "auto"}))
    assert yaml.safe_load((directory / "config.yaml").read_text())["run"]["resume"] is False
    (directory / "metrics.jsonl").write_text("{}\n")
    assert open_run_directory(config_in(run={"resume": "auto", "deadline": 4e9}, eval={"every": 7})) == directory
    assert (directory / "metrics.jsonl").exists()
    assert "resuming with another value: eval.every = 7" in caplog.text and "deadline" not in caplog.text
    assert yaml.safe_load((directory / "config.yaml").read_text())["run"]["deadline"] is None


@pytest.mark.parametrize(
    ("facts", "version"),
    [({"packages": {"ctpo-megatron": "0.1.7"}}, r" \(0\.1\.7\)"), ({"packages": {}}, ""), ({"host": "a"}, "")],
)
def test_a_run_of_another_version_is_refused_and_left_as_it_is(config_in, facts, version):
    directory = open_run_directory(config_in())
    assert json.loads((directory / "environment.json").read_text())["version"] == __version__
    (directory / "environment.json").write_text(json.dumps(facts))
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    message = rf"^{directory} was written by another version of ctpo-megatron{version}, and version "
    with pytest.raises(RunDirectoryError, match=message + __version__):
        open_run_directory(config_in(run={"resume": True}))
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("run", [{"resume": "auto"}, {"overwrite": True}])
def test_a_foreign_directory_is_never_touched(config_in, run):
    config = config_in(run=run)
    config.run.directory.mkdir(parents=True)
    (config.run.directory / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        open_run_directory(config)
    assert [path.name for path in config.run.directory.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("resume", ["auto", True])
def test_overwrite_and_resume_contradict(config_in, resume):
    with pytest.raises(RunDirectoryError, match="contradict each other"):
        open_run_directory(config_in(run={"resume": resume, "overwrite": True}))


def test_a_run_that_has_ended_is_left_alone_by_auto_until_there_is_more_to_do(config_in):
    auto = config_in(run={"resume": "auto"})
    assert not is_finished(auto.run)
    directory = open_run_directory(auto)
    assert not is_finished(auto.run)
    record_finish(directory, auto.run.steps)
    assert is_finished(auto.run)
    assert not is_finished(config_in().run) and not is_finished(config_in(run={"resume": True}).run)
    assert not is_finished(config_in(run={"resume": "auto", "steps": auto.run.steps + 1}).run)
    open_run_directory(config_in(run={"resume": True}))
    assert is_finished(auto.run)  # until it is certain that the run can continue
    take_over(config_in(run={"resume": True}))
    assert not is_finished(auto.run)


@pytest.mark.parametrize("linked", [False, True])
def test_overwrite_starts_anew_and_is_not_written_down(config_in, tmp_path, linked):
    config, elsewhere = config_in(), tmp_path / "large disk" / "demo"
    directory = config.run.directory
    if linked:
        elsewhere.mkdir(parents=True)
        directory.parent.mkdir(parents=True)
        directory.symlink_to(elsewhere)
    open_run_directory(config)
    (directory / "metrics.jsonl").write_text("{}\n")
    assert open_run_directory(config_in(run={"overwrite": True})) == directory
    assert directory.is_symlink() == linked and not (directory / "metrics.jsonl").exists()
    assert yaml.safe_load((directory / "config.yaml").read_text())["run"]["overwrite"] is False
    for folder in (directory.parent, directory.resolve().parent):
        assert [path.name for path in folder.iterdir()] == ["demo"]


def test_overwrite_refuses_the_working_directory(config_in, monkeypatch):
    directory = open_run_directory(config_in())
    monkeypatch.chdir(directory)
    with pytest.raises(RunDirectoryError, match="would delete"):
        open_run_directory(config_in(run={"overwrite": True}))


def test_resume_needs_a_run_and_names_what_changed(config_in, caplog):
    with pytest.raises(RunDirectoryError, match="holds no run"):
        open_run_directory(config_in(run={"resume": True}))
    directory = open_run_directory(config_in())
    with caplog.at_level(logging.WARNING):
        open_run_directory(config_in(run={"resume": True, "steps": 40}))
    assert yaml.safe_load((directory / "config.yaml").read_text())["run"]["steps"] == 20  # it may yet be refused
    take_over(config_in(run={"resume": True, "steps": 40}))
    assert yaml.safe_load((directory / "config.yaml").read_text())["run"]["steps"] == 40
    assert "run.steps = 40 (was 20)" in caplog.text
    assert "run.resume" not in caplog.text
    assert yaml.safe_load((directory / "config.previous.yaml").read_text())["run"]["steps"] == 20


LIVE = """
import os, sys
from pathlib import Path
from ctpo_megatron.base.files import claim
claim(Path(sys.argv[1]) / 'owner.lock')
if os.fork() == 0:  # like a process that goes on writing a checkpoint
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def live(config_in):
    """A process that lives in the run directory, with a child that outlives it; and its process id."""
    directory = open_run_directory(config_in())
    os.close(claim(directory / "owner.lock"))  # this process is not the owner
    command = [sys.executable, "-c", LIVE, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process


@pytest.mark.parametrize("switch", ["resume", "overwrite"])
def test_a_run_that_lives_is_left_to_its_owner(config_in, live, switch):
    config = config_in(run={switch: True})
    written = (config.run.directory / "config.yaml").read_text()
    changed = config_in(run={switch: True, "steps": 77})
    with pytest.raises(
        RunDirectoryError, match=rf"being written by process {live.pid} on {socket.gethostname()}, since"
    ):
        open_run_directory(changed)
    assert (config.run.directory / "config.yaml").read_text() == written
    live.kill()
    live.wait(timeout=scaled(30))
    open_run_directory(changed)
    assert f"process {os.getpid()} on" in (config.run.directory / "owner.lock").read_text()


def test_a_job_killed_before_it_began_leaves_nothing_in_the_way(config_in):
    config = config_in()
    config.run.directory.mkdir(parents=True)
    (config.run.directory / "owner.lock").touch()
    assert (open_run_directory(config) / "config.yaml").exists()


def test_a_file_system_without_locks_is_no_obstacle(config_in, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    open_run_directory(config_in())
    assert "cannot be locked ([Errno" in caplog.text
