"""Trackers: they get what metrics.jsonl gets, go on where they were, and never harm the run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.config import ConfigError, load_config
from ctpo_megatron.config.extension import Extension
from ctpo_megatron.tracking import MetricsWriter, open_trackers, read_metrics, tracker_problem

HERE = Path(__file__).parent


@pytest.fixture
def track(tmp_path, config_in):
    """Logs steps with a tracker of misbehaving_trackers.py as a run does; the lines that the tracker recorded."""

    def run(name, steps, arguments=None, timeout_s=20.0) -> list[str]:
        extension = {"name": f"misbehaving_trackers:{name}", "arguments": arguments or {}}
        config = config_in(tracking={"trackers": [extension], "timeout_s": timeout_s}, extensions={"path": [str(HERE)]})
        with open_trackers(config, tmp_path) as trackers, MetricsWriter(tmp_path, trackers) as writer:
            if writer.latest["step"] >= 0:
                writer.truncate_after(steps[0] - 1)
            for step in steps:
                writer.log(step, {"reward/mean": step / 2})
        recorded = tmp_path / "recorded.txt"
        return recorded.read_text().splitlines() if recorded.exists() else []

    return run


def test_a_tracker_gets_every_step_and_goes_on_after_a_resume(track, tmp_path):
    first = track("Recorder", [1, 2], {"project": "x"})
    assert first == [
        "made demo None {'project': 'x'}", "1 [('reward/mean', 0.5)]", "2 [('reward/mean', 1.0)]", "closed",
    ]  # fmt: skip
    assert track("Recorder", [2, 3])[4:] == [
        "made demo first {}", "rewind 1", "2 [('reward/mean', 1.0)]", "3 [('reward/mean', 1.5)]", "closed",
    ]  # fmt: skip
    assert not any("tracking/failures" in record for record in read_metrics(tmp_path))


def test_a_failure_is_named_once_and_costs_only_its_step(track, caplog):
    recorded = track("Fails", range(1, 7), {"steps": [2, 3, 5]})
    assert [line.split()[0] for line in recorded] == ["made", "1", "4", "6", "closed"]
    assert "switched off" not in caplog.text
    assert caplog.text.count("misbehaving_trackers:Fails failed (counted as tracking/failures)") == 1
    assert "no route to host, step 2" in caplog.text


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_what_is_no_exception_costs_only_its_step_as_well(track, caplog, error):
    recorded = track("Fails", range(1, 4), {"steps": [2], "error": error})
    assert [line.split()[0] for line in recorded] == ["made", "1", "3", "closed"]
    assert f"{error}: no route to host, step 2" in caplog.text


@pytest.mark.parametrize("name", ["Dies", "CannotStart", "Missing"])
def test_a_tracker_that_is_gone_is_switched_off_and_the_run_goes_on(track, tmp_path, caplog, name):
    track(name, range(1, 4))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    cause = {"Dies": "status 7", "CannotStart": "not logged in", "Missing": "has no 'Missing'"}[name]
    assert caplog.text.count(f"misbehaving_trackers:{name} is switched off") == 1 and cause in caplog.text


def test_failures_in_a_row_switch_a_tracker_off(track, caplog):
    track("Fails", range(1, 7), {"steps": list(range(1, 100))})
    assert caplog.text.count("is switched off") == 1
    assert "3 failures in a row, the last: OSError: no route to host, step 3" in caplog.text


def test_what_a_tracker_raises_steers_no_terminal(track, caplog):
    track("Steers", [1, 2])
    assert r"failed (counted as tracking/failures): ValueError: \x1b]0;title\x07\ud800" in caplog.text


def test_a_tracker_that_hangs_is_given_up_after_its_deadline(track, tmp_path, caplog):
    steps = range(1, 3000)  # more than a pipe holds
    assert [line.split()[0] for line in track("Hangs", steps, timeout_s=1.5)] == ["made", "1"]
    assert len(read_metrics(tmp_path)) == len(steps)
    assert caplog.text.count("is switched off") == 1 and "1.5 s (tracking.timeout_s)" in caplog.text


def test_a_tracker_that_never_finishes_is_ended(track, caplog):
    assert track("CannotClose", [1], timeout_s=1.5)[-1] == "closed"
    assert "within 1.5 s" in caplog.text


def test_failures_are_in_the_metrics_and_in_the_report(tmp_path, config_in):
    from ctpo_megatron.report.page import checks
    from ctpo_megatron.report.run_data import RunData

    (tmp_path / "config.yaml").write_text("{}")
    with open_trackers(config_in(), tmp_path) as trackers, MetricsWriter(tmp_path, trackers) as writer:
        writer.log(1, {"a/x": 1})
        trackers._active["tensorboard"]._tracker.log = lambda step, metrics: 1 / 0
        for name in ("a/x", "a/y", "a/z"):
            writer.log(2, {name: 1})
        writer.log(3, {"a/x": 1})
    assert [record.get("tracking/failures") for record in read_metrics(tmp_path)] == [None, 2.0, 1.0]
    found = {check.label: check for check in checks(RunData.load(tmp_path))}
    assert found["Tracker failures"].value == "3" and found["Tracker failures"].good is False


CANARY = "canary-0815-not-to-be-seen"
SECRETS = [
    "tracking.trackers=[{name: wandb, arguments: {api_key: %s}}]",
    "tracking.trackers=[{name: wandb, arguments: {settings: {api_key: %s}}}]",
    "tracking.trackers=[{name: wandb, api_key: %s}]",
    "tracking.trackers=[{name: mlflow, arguments: {tracking_uri: 'https://me:%s@host/'}}]",
    "tracking.trackers=[{name: wandb, arguments: {api_key: %s}",
    "tracking.trackers.0.arguments.api_key=%s",
    "+tracking.trackers=[{name: wandb, arguments: {password: %s}}]",
]


@pytest.mark.parametrize("override", SECRETS)
def test_secrets_are_refused_and_never_shown(override):
    config = HERE.parents[1] / "configs" / "quickstart.yaml"
    with pytest.raises(ConfigError) as refused:
        load_config(config, [override % CANARY])
    assert CANARY not in str(refused.value)
    assert CANARY not in str(refused.value.__cause__)


def test_arguments_that_are_no_secrets_are_taken():
    config = HERE.parents[1] / "configs" / "quickstart.yaml"
    harmless = "{entity: team, eos_token: x, sort_key: y, max_tokens: 3, tracking_uri: 'http://host:5000/'}"
    loaded = load_config(config, [f"tracking.trackers=[{{name: wandb, arguments: {harmless}}}]"])
    assert loaded.tracking.trackers[0].arguments["eos_token"] == "x"


def test_secrets_of_the_environment_are_in_no_file_and_no_log(track, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TRACKER_API_KEY", CANARY)
    with caplog.at_level(logging.DEBUG):
        track("Speaks", [1])
    assert "cannot log in with ***" in caplog.text
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not [path for path in written if CANARY in path.read_text(errors="replace")]


@pytest.mark.parametrize(
    ("extension", "problem"),
    [
        ("tensorboard", None),
        ({"name": "misbehaving_trackers:Recorder", "arguments": {"any": 1}}, None),
        ("misbehaving_trackers:Nobody", "has no 'Nobody'"),
        ("no_such_file:Recorder", "no module 'no_such_file'"),
        ({"name": "misbehaving_trackers:CannotStart", "arguments": {"any": 1}}, "unexpected keyword argument 'any'"),
        ("misbehaving_trackers:NoClose", "has no method close"),
        ("misbehaving_trackers:NOT_CALLABLE", "is no class or function"),
        ("tensorbord", "write tensorboard, wandb, mlflow, prometheus, or package.module:Name"),
        ("jsonl", "metrics.jsonl is always written"),
        ({"name": "mlflow", "arguments": {"expriment": "x"}}, "unexpected keyword argument 'expriment'"),
    ],
)
def test_the_dry_run_knows_what_cannot_be_made(extension, problem, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    activate([HERE])
    elsewhere = "/bin/sh" if "mlflow" in str(extension) else None  # it is not installed here
    found = tracker_problem(Extension.model_validate(extension), elsewhere)
    assert (problem in found) if problem else found is None


def test_an_interpreter_that_is_not_there_is_a_problem():
    assert "/no/python is not there" in tracker_problem(Extension(name="wandb"), "/no/python")
