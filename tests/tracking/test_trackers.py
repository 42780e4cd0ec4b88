"""Trackers: they get what metrics.jsonl gets, go on where they were, and never harm the run."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.config import ConfigError, load_config
from ctpo_megatron.config.extension import Extension
from ctpo_megatron.tracking import MetricsWriter, open_trackers, read_metrics, tracker_problem
from tests.support.deadlines import scaled

HERE = Path(__file__).parent


@dataclass
class Outcome:
    """What came of a run. longest_s: the longest that one step waited. closing_s: what the end waited."""

    failures: float
    longest_s: float
    closing_s: float
    recorded: dict[str, list[str]] = field(default_factory=dict)


@pytest.fixture
def track(tmp_path, config_in):
    """Logs steps as a run does, with trackers of misbehaving_trackers.py: class name -> arguments."""

    def run(trackers: dict[str, dict[str, Any]], steps, timeout_s=20.0) -> Outcome:
        named = [{"name": f"misbehaving_trackers:{name}", "arguments": given} for name, given in trackers.items()]
        config = config_in(tracking={"trackers": named, "timeout_s": timeout_s}, extensions={"path": [str(HERE)]})
        longest = 0.0
        with MetricsWriter(tmp_path, opened := open_trackers(config, tmp_path)) as writer:
            if writer.latest["step"] >= 0:
                writer.truncate_after(steps[0] - 1)
            for step in steps:
                began = time.monotonic()
                writer.log(step, {"reward/mean": step / 2})
                longest = max(longest, time.monotonic() - began)
            began = time.monotonic()
            opened.close()
            closing = time.monotonic() - began
        counted = sum(record.get("tracking/failures", 0.0) for record in read_metrics(tmp_path))
        outcome = Outcome(counted + opened.take_failures(), longest, closing)
        for name in trackers:
            path = tmp_path / f"recorded_{name}.txt"
            outcome.recorded[name] = path.read_text().splitlines() if path.exists() else []
        return outcome

    yield run
    (tmp_path / "released").touch()


def words(lines: list[str]) -> str:
    """The first word of each line."""
    return " ".join(line.split()[0] for line in lines)


MANY = range(1, 1501)
"""More steps than wait for a tracker at once."""


@dataclass
class Case:
    """Trackers, the steps of a run, the first words that each tracker records, failures, and what the log says once.

    recorded: None: what is not done when the run ends is lost.
    """

    trackers: dict[str, dict[str, Any]]
    recorded: dict[str, str | None]
    steps: range = range(1, 7)
    failures: int = 0
    said: tuple[str, ...] = ()
    timeout_s: float = 20.0


def faults(what: str, *moments: str) -> dict[str, dict[str, Any]]:
    """The tracker that goes wrong in this way at these moments."""
    return {"Faulty": {"faults": dict.fromkeys(moments, what)}}


ALL = "made 1 2 3 4 5 6 closed"
IS_OFF = "is switched off"
CASES = {
    "works": Case({"Recorder": {}}, {"Recorder": ALL}),
    "changes what it gets": Case({"Changes": {}, "Recorder": {}}, {"Changes": ALL, "Recorder": ALL}),
    "starts a process": Case({"Starts": {}}, {"Starts": ALL.replace("made", "made spared")}),
    "prints": Case(faults("print", "any step"), {"Faulty": ALL}),
    "is slow": Case(faults("be slow", "any step"), {"Faulty": f"made {' '.join(map(str, MANY))} closed"}, MANY),
    "fails now and then": Case(
        faults("OSError", "2", "3", "5"), {"Faulty": ALL}, failures=3,
        said=("misbehaving_trackers:Faulty failed (counted as tracking/failures): OSError: no route to host, 2",),
    ),
    "fails always, beside one that works": Case(
        faults("OSError", "any step") | {"Recorder": {}}, {"Faulty": "made 1 2 3 closed", "Recorder": ALL}, failures=3,
        said=(f"Faulty {IS_OFF}, and the run continues without it: 3 failures in a row, the last: OSError: no route",),
    ),
    **{
        f"raises {error}": Case(
            faults(error, "2"), {"Faulty": ALL}, failures=1, said=(f"{error}: no route to host, 2",)
        )
        for error in ("SystemExit", "KeyboardInterrupt", "GeneratorExit")
    },
    "cannot start, beside one that works": Case(
        faults("PermissionError", "start") | {"Recorder": {}}, {"Faulty": "made", "Recorder": ALL},
        failures=1, said=(f"Faulty {IS_OFF}", "PermissionError: no route to host, start"),
    ),
    "is not there": Case({"Missing": {}}, {"Missing": ""}, failures=1, said=(f"Missing {IS_OFF}", "has no 'Missing'")),
    "fails at the end": Case(
        faults("ConnectionError", "end") | {"Recorder": {}}, {"Faulty": ALL, "Recorder": ALL},
        failures=1, said=("ConnectionError: no route to host, end",),
    ),
    "steers the terminal": Case(
        faults("steer", "any step"), {"Faulty": "made 1 2 closed"}, range(1, 3), failures=2,
        said=(r"failed (counted as tracking/failures): ValueError: \x1b]0;title\x07\ud800",),
    ),
    "hangs, beside one that works": Case(
        faults("wait", "1") | {"Recorder": {}},
        {"Faulty": "made 1", "Recorder": f"made {' '.join(map(str, MANY))} closed"},
        MANY, failures=1, timeout_s=1.5, said=(f"Faulty {IS_OFF}", "1.5 s (tracking.timeout_s)"),
    ),
    "hangs at the start": Case(
        faults("wait", "start") | {"Recorder": {}}, {"Faulty": "made", "Recorder": ALL},
        failures=1, timeout_s=1.5, said=(f"Faulty {IS_OFF}", "1.5 s"),
    ),
    "hangs at the end, beside one that works": Case(
        faults("wait", "end") | {"Recorder": {}}, {"Faulty": ALL, "Recorder": ALL},
        failures=1, timeout_s=1.5, said=("Faulty", "did not finish within 1.5 s; what it still had is lost"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_tracker_gets_every_step_and_never_harms_the_run(track, tmp_path, caplog, case):
    outcome = track(case.trackers, case.steps, case.timeout_s)
    assert {name: words(lines) for name, lines in outcome.recorded.items()} == case.recorded
    assert [record["step"] for record in read_metrics(tmp_path)] == list(case.steps)
    assert all(record["reward/mean"] == record["step"] / 2 for record in read_metrics(tmp_path))
    assert outcome.failures == case.failures
    assert max(outcome.longest_s, outcome.closing_s) < case.timeout_s + scaled(3)
    messages = "\n".join(record.getMessage() for record in caplog.records)
    assert [messages.count(text) for text in case.said] == [1] * len(case.said), messages
    assert bool(caplog.records) == bool(case.failures)


def test_a_tracker_that_hangs_is_switched_off_at_the_next_step(tmp_path, config_in, caplog):
    hangs = {"name": "misbehaving_trackers:Faulty", "arguments": faults("wait", "1")["Faulty"]}
    tracking = {"trackers": [hangs], "timeout_s": 1.0}
    config = config_in(tracking=tracking, extensions={"path": [str(HERE)]})
    with open_trackers(config, tmp_path) as trackers:
        trackers.log(1, {"a/x": 1.0})
        time.sleep(scaled(1.5))
        began = time.monotonic()
        trackers.log(2, {"a/x": 1.0})
        assert trackers.take_failures() == 1
        assert "a call did not return within 1 s (tracking.timeout_s)" in caplog.text
    assert time.monotonic() - began < 1.0  # its end is not waited for again
    (tmp_path / "released").touch()


def test_a_resumed_run_goes_on_where_its_tracker_was(track, tmp_path):
    first = track({"Recorder": {"project": "x"}}, [1, 2]).recorded["Recorder"]
    assert first == [
        "made demo None {'project': 'x'}", "1 [('reward/mean', 0.5)]", "2 [('reward/mean', 1.0)]", "closed",
    ]  # fmt: skip
    assert track({"Recorder": {}}, [2, 3]).recorded["Recorder"][4:] == [
        "made demo first {}", "rewind 1", "2 [('reward/mean', 1.0)]", "3 [('reward/mean', 1.5)]", "closed",
    ]  # fmt: skip
    assert not any("tracking/failures" in record for record in read_metrics(tmp_path))


def test_failures_are_in_the_metrics_and_in_the_report(tmp_path, config_in):
    """Two failures before one line count as two."""
    from ctpo_megatron.report.page import checks
    from ctpo_megatron.report.run_data import RunData

    (tmp_path / "config.yaml").write_text("{}")
    tracker = {"name": "misbehaving_trackers:Faulty", "arguments": {"faults": {"1": "wait", "2": "OSError"}}}
    config = config_in(tracking={"trackers": [tracker]}, extensions={"path": [str(HERE)]})
    recorded, deadline = tmp_path / "recorded_Faulty.txt", time.monotonic() + scaled(60)
    with open_trackers(config, tmp_path) as trackers, MetricsWriter(tmp_path, trackers) as writer:
        for step, name in ((1, "a/x"), (2, "a/x"), (2, "a/y"), (3, "a/x")):
            writer.log(step, {name: 1})
        (tmp_path / "released").touch()
        while not (recorded.exists() and "\n3 " in recorded.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        for step in (4, 5):
            writer.log(step, {"a/x": 1})
    assert [value for record in read_metrics(tmp_path) if (value := record.get("tracking/failures"))] == [2.0]
    found = {check.label: check for check in checks(RunData.load(tmp_path))}
    assert found["Tracker failures"].value == "2" and found["Tracker failures"].good is False


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
        track(faults("tell", "1"), [1])
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
        ({"name": "misbehaving_trackers:Changes", "arguments": {"any": 1}}, "unexpected keyword argument 'any'"),
        ("misbehaving_trackers:NoClose", "has no method close"),
        ("misbehaving_trackers:NOT_CALLABLE", "is no class or function"),
        ("tensorbord", "write tensorboard, wandb, mlflow, prometheus, or package.module:Name"),
        ("jsonl", "metrics.jsonl is always written"),
        ({"name": "wandb", "arguments": {"mode": "offline"}}, None),
        ({"name": "prometheus", "arguments": {"prt": 1}}, "unexpected keyword argument 'prt'"),
    ],
)
def test_the_dry_run_knows_what_cannot_be_made(extension, problem, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    activate([HERE])
    found = tracker_problem(Extension.model_validate(extension))
    assert (problem in found) if problem else found is None


def test_a_package_that_is_missing_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("sys.path", [str(HERE.parents[1])])
    assert "the package wandb is not installed: pip install " in tracker_problem(Extension(name="wandb"))
