"""The comparison of two runs: one changed bit of each kind is found and named; nothing compared is not equal."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from tests.compare_runs import compare
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT
from tests.tracking.synthetic_run import write_run

pytestmark = pytest.mark.slow  # of a tool that is run by hand

Record = dict[str, Any]
Edit = Callable[[Path], object]
LAST, WEIGHTS = "trajectories/step_000002.parquet", "model/model.safetensors"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal runs of two steps with dumps, evaluations, statistics by position and weights."""
    run = write_run(tmp_path / "made", steps=2, samples=2, prompts=2)
    lines = [{"step": step, "mini_batch": of, "zero": {"S": [0.5]}} for step in (1, 2) for of in ("all", "last")]
    (run / "positions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "model").mkdir()
    weights = {"a.bias": torch.arange(3.0), "a.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}
    save_file(weights, run / WEIGHTS, {"format": "pt"})
    return run, Path(shutil.copytree(run, tmp_path / "b"))


def edited(file: str, line: int, change: Callable[[Record], object]) -> Edit:
    """Change one record of a dump, or of lines of JSON."""

    def edit(run: Path) -> None:
        path = run / file
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            records = table.to_pylist()
            change(records[line])
            pq.write_table(pa.Table.from_pylist(records, table.schema), path)
        else:
            records = [json.loads(text) for text in path.read_text().splitlines()]
            change(records[line])
            path.write_text("".join(json.dumps(record) + "\n" for record in records))

    return edit


def in_batch(name: str, change: Callable[[Any], Any]) -> Edit:
    """Change a field of sample 1 of prompt 1 in the second step."""
    return edited(LAST, 3, lambda record: record.update({name: change(record[name])}))


def in_weights(change: Callable[[bytes], bytes]) -> Edit:
    return lambda run: (run / WEIGHTS).write_bytes(change((run / WEIGHTS).read_bytes()))


SAMPLE = "trajectories, step 2, trajectory 3, prompt rem-1, sample 1"
EDITS: dict[str, tuple[Edit, str]] = {
    "loss": (
        edited("metrics.jsonl", 1, lambda record: record.update({"reward/std": math.nextafter(0.4, 1)})),
        "metrics.jsonl, step 1, metric reward/std: 0.4 against 0.4000000000000001",
    ),
    "missing metric": (
        edited("metrics.jsonl", 2, lambda record: record.pop("reward/std")),
        "metrics.jsonl, step 2, metric reward/std against metric ",
    ),
    "position": (
        edited("positions.jsonl", 1, lambda record: record.update({"zero": {"S": [math.nextafter(0.5, 1)]}})),
        "positions.jsonl, step 1, mini-batch last, metric zero, S, position 0: 0.5 against 0.5000000000000001",
    ),
    "token": (
        in_batch("token_ids", lambda ids: [*ids[:2], ids[2] ^ 1, *ids[3:]]),
        f"{SAMPLE}, token_ids, position 2: 105 against 104",
    ),
    "sign of zero": (
        in_batch("rollout_log_probs", lambda values: [-values[0], *values[1:]]),
        f"{SAMPLE}, rollout_log_probs, position 0: 0.0 against -0.0",
    ),
    "shorter": (in_batch("turn", lambda turns: turns[:-1]), f"{SAMPLE}, turn: "),
    "tool output": (
        in_batch("tool_calls", lambda calls: [calls[0] | {"output": "x"}]),
        f"{SAMPLE}, tool_calls, position 0, output: '2' against 'x'",
    ),
    "order": (
        edited("trajectories/step_000001.parquet", 0, lambda record: record.update({"sample_index": 1})),
        "trajectories, step 1, trajectory 0, prompt rem-0, sample 0, token_ids against trajectory 0, prompt rem-0, "
        "sample 1, token_ids",
    ),
    "evaluation": (
        edited("evaluation/step_000002.parquet", 0, lambda record: record.update({"reward": 0.5})),
        "evaluation, step 2, trajectory 0, prompt rem-0, sample 0, reward: 1.0 against 0.5",
    ),
    "weight": (
        in_weights(lambda raw: raw[:-12] + bytes([raw[-12] ^ 1]) + raw[-11:]),
        f"{WEIGHTS}, tensor a.bias, element 2: bytes 00000040 against 01000040",
    ),
    "dtype": (
        in_weights(lambda raw: raw.replace(b'"BF16"', b'"F16" ')),
        f"{WEIGHTS}, tensor a.weight: BF16 [2, 2] against F16 [2, 2]",
    ),
    "tensor's name": (
        in_weights(lambda raw: raw.replace(b'"a.bias"', b'"a.bios"')),
        f"{WEIGHTS}, tensor a.bias against tensor a.bios",
    ),
}


@pytest.mark.parametrize(("edit", "named"), EDITS.values(), ids=list(EDITS))
def test_one_change_is_found_and_named(runs: tuple[Path, Path], edit: Edit, named: str) -> None:
    edit(runs[1])
    status, lines = compare(*runs)
    assert status == 1
    assert lines[0].startswith(f"first difference: {named}"), lines[0]


def test_the_first_in_time_is_named(runs: tuple[Path, Path]) -> None:
    for kind in ("weight", "token", "loss"):
        EDITS[kind][0](runs[1])
    assert compare(*runs)[1][0] == f"first difference: {EDITS['loss'][1]}"


def test_equal_runs_say_what_was_compared(runs: tuple[Path, Path]) -> None:
    status, (said, *parts) = compare(*runs)
    assert (status, said) == (0, f"equal: {runs[0]} and {runs[1]}")
    assert [re.sub(r"[\d,]{2,} ", "N ", part) for part in parts] == [
        "sft: N steps, N values",
        "trajectories: 2 dumps, 8 samples, N tokens, N values",
        "metrics: 3 steps, N values",
        "positions: 4 steps, 8 values",
        "evaluation: 2 dumps, 4 samples, N tokens, N values",
        "tensors: 1 files, 2 tensors, N bytes",
    ]


def test_what_may_differ(runs: tuple[Path, Path]) -> None:
    """Seconds, dumps of resumed steps, and checkpoints."""
    edited("metrics.jsonl", 1, lambda record: record.update({"time/step": 9.0}))(runs[1])
    edited("sft.jsonl", 1, lambda record: record.update({"sft/seconds": 9.0}))(runs[1])
    in_batch("tool_calls", lambda calls: [calls[0] | {"wall_s": 9.0, "exec_s": None, "began_at": 1.0}])(runs[1])
    in_batch("scored_at", lambda _: [1.0, 2.0])(runs[1])
    shutil.copy(runs[1] / "trajectories" / "step_000001.parquet", runs[1] / "trajectories" / "discarded_step_2.parquet")
    shutil.copytree(runs[1] / "model", runs[1] / "checkpoints" / "step_000002")
    assert compare(*runs)[0] == 0


def test_what_one_run_or_both_lack_is_not_equal(runs: tuple[Path, Path]) -> None:
    for run in runs:
        shutil.rmtree(run / "trajectories")
        assert compare(*runs)[0] == 2
    assert compare(*runs, only=["metrics", "tensors"])[0] == 0


def test_the_command(runs: tuple[Path, Path], tmp_path: Path) -> None:
    def command(*arguments: Path | str) -> tuple[int, str]:
        call = [sys.executable, "-m", "tests.compare_runs", *map(str, arguments)]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=scaled(60))
        return done.returncode, done.stdout

    assert command(*runs)[0] == 0
    assert command(tmp_path / "x", tmp_path / "y")[0] == 2
    EDITS["token"][0](runs[1])
    status, output = command(*runs, "--only", "trajectories")
    assert status == 1
    assert output.startswith(f"first difference: {EDITS['token'][1]}\nA is {runs[0]}\n")
