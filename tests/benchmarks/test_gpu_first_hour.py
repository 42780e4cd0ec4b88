"""The first hour on a GPU: stages end at their limit, nothing is lost, and a second call goes on."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu_first_hour import __main__ as program
from benchmarks.gpu_first_hour.run import Interrupt, Record, run_stage
from benchmarks.gpu_first_hour.stages import Machine, Stage, stages
from ctpo_megatron.base.processes import wait_for
from tests.support import children
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

pytestmark = pytest.mark.slow  # benchmarks are run by hand: weekly is often enough
CPU = Machine("cpu", 0, "a-processor")
ENVIRONMENT = {"device": "a processor", "versions": {"torch": "2"}, "commit": "c" * 40, "date": "today"}


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def run(stage: Stage, folder: Path) -> Record:
    return run_stage(stage, folder / "log", ROOT, "c" * 40, Interrupt(), left_s=math.inf, site=None)


def test_a_stage_over_its_limit_ends_with_all_that_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = f"import os, time\nif process := os.fork(): open({str(child)!r}, 'w').write(str(process))\ntime.sleep(600)"
    record = run(Stage("a", "", 3, python(code)), tmp_path)
    assert (record.status, record.detail) == ("over its limit", "ended after 3 s")
    with suppress(psutil.NoSuchProcess):  # it is being killed, or over already
        assert wait_for([psutil.Process(int(child.read_text()))], scaled(10)) == []


def test_what_a_machine_cannot_run_is_skipped_with_the_reason(tmp_path: Path) -> None:
    skipped = {stage.name: stage.skip for stage in stages(CPU, tmp_path) if stage.skip}
    assert skipped["test-gpu"] == "needs a CUDA device" and set(skipped) >= {"sanitizer-memcheck", "engine-v2"}
    one, two = (stages(Machine("cuda", gpus, "gpu"), tmp_path)[-1] for gpus in (1, 2))
    assert one.skip == "needs two GPUs" and not two.skip
    assert not {"test-gpu", "engine-v2", "kernels-C"} & {
        s.name for s in stages(Machine("cuda", 1, "g"), tmp_path) if s.skip
    }


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stage]]:
    """The stages of the program; its commit is one without changes."""
    stages: list[Stage] = []
    monkeypatch.setattr(program, "stages", lambda machine, work: stages)
    monkeypatch.setattr(program.report, "environment", lambda device: ENVIRONMENT)
    before = signal.getsignal(signal.SIGINT)
    yield stages
    signal.signal(signal.SIGINT, before)


def test_a_second_call_goes_on_where_the_first_ended(tmp_path: Path, planned: list[Stage]) -> None:
    ran = tmp_path / "ran"
    note = python(f"open({str(ran)!r}, 'a').write('x')")
    planned += [
        Stage("good", "", 60, note),
        Stage("bad", "", 60, python("raise SystemExit(1)")),
        Stage("no", "", 1, skip="no"),
    ]
    call = ["--device", "cpu", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert program.main(call) == 1
    results = tmp_path / "out" / "a-processor.jsonl"
    with results.open("a") as file:
        file.write('{"stage": "good", "sta')  # the machine was taken away
    planned[1] = Stage("bad", "", 60, python("pass"))
    assert program.main(call) == 0
    assert ran.read_text() == "x"
    lines = results.read_text().splitlines()
    assert [json.loads(line)["stage"] for n, line in enumerate(lines) if n != 3] == ["good", "bad", "no", "bad", "no"]
    assert program.main([*call, "--again", "--only", "good"]) == 0 and ran.read_text() == "xx"
    assert "| good" in (tmp_path / "out" / "a-processor.md").read_text()
    with pytest.raises(SystemExit, match="unknown stage gone; known: good, bad, no"):
        program.main([*call, "--only", "gone"])


def test_ctrl_c_ends_the_stage_and_keeps_what_is_done(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_first_hour", "--device", "cpu", "--only", "test-gpu", "two-ranks"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        deadline = time.monotonic() + scaled(120)
        while not (line := process.stdout.readline()).startswith("two-ranks: TP 2"):
            assert line and time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        assert process.wait(scaled(60)) == 130
    finally:
        children.end(process)
    (results,) = (tmp_path / "out").glob("*.jsonl")
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(record["stage"], record["status"]) for record in records] == [
        ("test-gpu", "skipped"),
        ("two-ranks", "interrupted"),
    ]
    assert "interrupted: Ctrl-C" in results.with_suffix(".md").read_text()


def records_printed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_every_record_is_printed_and_results_of_a_cpu_stay_out_of_the_tree(
    tmp_path: Path, planned: list[Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are the last line that the stage itself wrote; a failure shows the end of its log."""
    out, old = tmp_path / "figures.jsonl", tmp_path / "old.json"
    old.write_text('{"x": 1}')
    write = python(f"open({str(out)!r}, 'w').write('{{}}\\n{{\"x\": 1}}\\n')")
    planned += [
        Stage("bad", "", 60, python("print('why'); raise SystemExit(3)"), tmp_path / "absent.json"),
        Stage("gone", "", 60, ("/no/such/program",)),
        Stage("old", "", 60, python("pass"), old),
        Stage("good", "", 60, write, out),
    ]
    assert program.main(["--device", "cpu", "--work", str(tmp_path / "work")]) == 1
    bad, gone, stale, good = records_printed(capsys.readouterr().out)
    assert (bad["status"], bad["detail"]) == ("failed", "exit status 3; absent.json was not written")
    assert "why" in (tmp_path / "work" / "a-processor.md").read_text()
    assert (gone["status"], stale.get("figures")) == ("failed", None)
    assert (good["stage"], good["status"], good["figures"]) == ("good", "passed", {"x": 1})
    assert {file.name for file in (tmp_path / "work").glob("a-processor.*")} == {"a-processor.jsonl", "a-processor.md"}


def test_a_budget_ends_a_stage_and_leaves_out_what_does_not_fit(
    tmp_path: Path, planned: list[Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    planned += [
        Stage("large", "", 600, python("pass"), expected_s=300),
        Stage("long", "", 600, python("import time; time.sleep(600)"), expected_s=1),
        Stage("late", "", 60, python("pass")),
    ]
    call = ["--device", "cpu", "--work", str(tmp_path)]
    assert program.main([*call, "--budget-s", "5"]) == 1
    large, long, late = records_printed(capsys.readouterr().out)
    assert large["status"] == "skipped"
    assert large["detail"].startswith("takes about 300 s, and ") and "left of --budget-s" in large["detail"]
    assert long["status"] == "over its limit" and long["seconds"] < scaled(30)
    assert late["status"] == "skipped"
    planned[1] = Stage("long", "", 600, python("pass"), expected_s=1)
    assert program.main(call) == 0
    assert [(record["stage"], record["status"]) for record in records_printed(capsys.readouterr().out)] == [
        ("large", "passed"),
        ("long", "passed"),
        ("late", "passed"),
    ]
    assert program.main([*call, "--budget-s", "1"]) == 0 and not records_printed(capsys.readouterr().out)


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with one module, whose script notes every call."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "unpack.sh").write_text(
        'echo x >> "$0.calls"; echo "there = 1" > "$1/of_the_bundle.py"; mkdir -p "$1/models/m"'
    )
    return folder


def test_a_bundle_is_unpacked_once_for_all_stages(tmp_path: Path, planned: list[Stage], packed: Path) -> None:
    planned.append(Stage("a", "", 60, python("import of_the_bundle, ctpo_sandbox")))
    call = ["--device", "cpu", "--work", str(tmp_path / "work"), "--bundle", str(packed)]
    calls = packed / "unpack.sh.calls"
    assert program.main(call) == program.main([*call, "--again"]) == 0
    assert calls.read_text() == "x\n" and (tmp_path / "work" / "site" / "of_the_bundle.py").exists()
    (packed / "second.tar.xz").touch()  # archives may come one after another
    assert program.main(call) == 0 and calls.read_text() == "x\nx\n"
    (packed / "manifest.json").write_text("{ }")
    assert program.main(call) == 0 and calls.read_text() == "x\nx\nx\n"


def test_it_starts_where_no_package_is_but_torch() -> None:
    """A bare machine has the others once the bundle is unpacked."""
    absent = ("ctpo_megatron", "megatron", "omegaconf", "pydantic", "ray", "transformers", "vllm", "yaml")
    code = (
        f"import sys; sys.modules |= dict.fromkeys({absent}); from benchmarks.gpu_first_hour import __main__ as program"
    )
    done = children.run(
        [sys.executable, "-c", f"{code}; program.main(['--help'])"],
        directory=ROOT,
        environment=dict(os.environ),
        deadline_s=120,
    )
    assert done.returncode == 0 and "--bundle" in done.stdout, done.stderr


@pytest.mark.timeout(2700)
def test_every_stage_that_a_cpu_can_run_passes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_first_hour", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    options = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    done = children.run([*command, *options], directory=ROOT, environment=environment, deadline_s=2600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not run" not in next((tmp_path / "out").glob("*.md")).read_text().partition("## ")[0]
