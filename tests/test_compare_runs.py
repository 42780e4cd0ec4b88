"""The comparison of two runs: one changed bit of each kind is found and named; nothing compared is not equal."""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.compare_runs import compare
from tests.support.deadlines import scaled

pytestmark = pytest.mark.slow  # of a tool that is run by hand

ROOT = Path(__file__).resolve().parents[1]
Record = dict[str, Any]
Edit = Callable[[Path], None]


SECONDS = {"wall_s": 0.1, "exec_s": 0.05, "began_at": 1.8e9}
CALL = {"turn": 1, "name": "python", "arguments": {"code": "print(1)"}, "output": "1", **SECONDS}


def trajectory(prompt: int, sample: int, version: int) -> Record:
    """As a run dumps one, shorter."""
    return {
        "prompt_id": f"train-{prompt}",
        "sample_index": sample,
        "seed": 17 * prompt + sample,
        "token_ids": [1, 5, 9, 2],
        "response_mask": [0, 1, 1, 1],
        "loss_mask": [0, 1, 1, 1],
        "rollout_log_probs": [0.0, -0.1, -1.7763568394002505e-15, -0.3],
        "weight_version": [-1, version, version, version],
        "turn": [0, 1, 1, 1],
        "finish_reason": "answer",
        "tool_calls": [CALL],
        "scored_at": [1.8e9, 1.8e9 + 0.5],
        "final_text": "\\boxed{1}",
        "reward": 1.0,
        "reward_components": {"format": 0.5},
        "answer": "1",
        "data_source": "toolmath",
        "segments": [{"turn": 0, "kind": "prompt", "text": "1?"}],
        "advantage": 0.5,
        "log_ratio": [0.0, 0.0, 0.0, 0.0],
    }


def read(path: Path) -> list[Record]:
    """A dump, or JSON lines."""
    return (
        pq.read_table(path).to_pylist()
        if path.suffix == ".parquet"
        else [json.loads(line) for line in path.read_text().splitlines()]
    )


def write(path: Path, records: list[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_tensors(path: Path, weights: list[float]) -> None:
    """A safetensors file with one float32 vector and one bfloat16 matrix."""
    data = struct.pack(f"<{len(weights)}f", *weights) + bytes(8)
    header = {
        "__metadata__": {"format": "pt"},
        "a.bias": {"dtype": "F32", "shape": [len(weights)], "data_offsets": [0, 4 * len(weights)]},
        "a.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [4 * len(weights), len(data)]},
    }
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal runs of two steps: metrics, dumps, an evaluation, start weights, exported weights."""
    run = tmp_path / "a"
    write(run / "sft.jsonl", [{"step": n, "sft/loss": 2.0 / n, "sft/seconds": 0.1} for n in (1, 2)])
    metrics = [{"step": n, "reward/mean": 0.5, "actor/pg_loss": -0.25 * n, "time/step": 1.5} for n in (0, 1, 2)]
    write(run / "metrics.jsonl", metrics)
    lines = ((1, "all"), (1, "last"), (2, "all"))
    positions = [{"step": step, "mini_batch": of, "zero": {"S": [0.5]}} for step, of in lines]
    write(run / "positions.jsonl", positions)
    for step in (1, 2):
        batch = [trajectory(prompt, sample, step - 1) for prompt in (0, 1) for sample in (0, 1)]
        write(run / "trajectories" / f"step_{step:06d}.parquet", batch)
    write(run / "evaluation" / "step_000002.parquet", [trajectory(7, 0, 2)])
    write_tensors(run / "task" / "model" / "model.safetensors", [0.0, 1.0])
    write_tensors(run / "model" / "model.safetensors", [0.0, 1.0, 2.0])
    shutil.copytree(run, tmp_path / "b")
    return run, tmp_path / "b"


def edited(file: str, line: int, change: Callable[[Record], None]) -> Edit:
    """Change one record of a file."""

    def edit(run: Path) -> None:
        records = read(run / file)
        change(records[line])
        write(run / file, records)

    return edit


def in_batch(name: str, change: Callable[[Any], Any], position: int | None = None) -> Edit:
    """Change a field of sample 1 of prompt 1 in the second step."""

    def apply(record: Record) -> None:
        if position is None:
            record[name] = change(record[name])
        else:
            record[name][position] = change(record[name][position])

    return edited("trajectories/step_000002.parquet", 3, apply)


def flipped_bit(file: str, offset_from_end: int) -> Edit:
    def edit(run: Path) -> None:
        raw = bytearray((run / file).read_bytes())
        raw[-offset_from_end] ^= 1
        (run / file).write_bytes(raw)

    return edit


def retyped(run: Path) -> None:
    path = run / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" '))


def renamed(run: Path) -> None:
    path = run / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"a.bias"', b'"a.bios"'))


def next_float(value: float) -> float:
    return math.nextafter(value, math.inf)


SAMPLE = "trajectories, step 2, trajectory 3, prompt train-1, sample 1"
EDITS: dict[str, tuple[Edit, str]] = {
    "loss": (
        edited("metrics.jsonl", 1, lambda record: record.update({"actor/pg_loss": next_float(-0.25)})),
        "metrics.jsonl, step 1, metric actor/pg_loss: -0.25 against -0.24999999999999997",
    ),
    "missing metric": (
        edited("metrics.jsonl", 2, lambda record: record.pop("reward/mean")),
        "metrics.jsonl, step 2, metric reward/mean against metric step",
    ),
    "SFT loss": (
        edited("sft.jsonl", 1, lambda record: record.update({"sft/loss": next_float(1.0)})),
        "sft.jsonl, step 2, metric sft/loss: 1.0 against 1.0000000000000002",
    ),
    "position": (
        edited("positions.jsonl", 1, lambda record: record.update({"zero": {"S": [next_float(0.5)]}})),
        "positions.jsonl, step 1, mini-batch last, metric zero, S, position 0: 0.5 against 0.5000000000000001",
    ),
    "token": (in_batch("token_ids", lambda token: token ^ 1, 2), f"{SAMPLE}, token_ids, position 2: 9 against 8"),
    "log-prob": (
        in_batch("rollout_log_probs", next_float, 1),
        f"{SAMPLE}, rollout_log_probs, position 1: -0.1 against -0.09999999999999999",
    ),
    "sign of zero": (
        in_batch("rollout_log_probs", lambda value: -value, 0),
        f"{SAMPLE}, rollout_log_probs, position 0: 0.0 against -0.0",
    ),
    "version": (in_batch("weight_version", lambda v: v ^ 1, 3), f"{SAMPLE}, weight_version, position 3: 1 against 0"),
    "shorter": (in_batch("turn", lambda turns: turns[:-1]), f"{SAMPLE}, turn: 4 against 3 values"),
    "tool output": (
        in_batch("tool_calls", lambda calls: [calls[0] | {"output": "2"}]),
        f"{SAMPLE}, tool_calls, position 0, output: '1' against '2'",
    ),
    "order": (
        edited("trajectories/step_000001.parquet", 0, lambda record: record.update({"sample_index": 1})),
        "trajectories, step 1, trajectory 0, prompt train-0, sample 0, token_ids against trajectory 0, prompt train-0, "
        "sample 1, token_ids",
    ),
    "evaluation": (
        edited("evaluation/step_000002.parquet", 0, lambda record: record.update({"reward": 0.0})),
        "evaluation, step 2, trajectory 0, prompt train-7, sample 0, reward: 1.0 against 0.0",
    ),
    "weight": (
        flipped_bit("model/model.safetensors", 12),  # the last float32
        "model/model.safetensors, tensor a.bias, element 2: bytes 00000040 against 01000040",
    ),
    "last weight": (
        flipped_bit("model/model.safetensors", 1),
        "model/model.safetensors, tensor a.weight, element 3: bytes 0000 against 0001",
    ),
    "dtype": (retyped, "model/model.safetensors, tensor a.weight: BF16 [2, 2] against F16 [2, 2]"),
    "tensor's name": (renamed, "model/model.safetensors, tensor a.bias against tensor a.bios"),
}


@pytest.mark.parametrize(("edit", "named"), EDITS.values(), ids=list(EDITS))
def test_one_change_is_found_and_named(runs: tuple[Path, Path], edit: Edit, named: str) -> None:
    edit(runs[1])
    status, lines = compare(*runs)
    assert status == 1
    assert lines[0].startswith(f"first difference: {named}"), lines[0]


def test_the_first_in_time_is_named(runs: tuple[Path, Path]) -> None:
    for kind in ("weight", "version", "loss"):
        EDITS[kind][0](runs[1])
    assert compare(*runs)[1][0] == f"first difference: {EDITS['loss'][1]}"


def test_equal_runs_say_what_was_compared(runs: tuple[Path, Path]) -> None:
    assert compare(*runs) == (
        0,
        [
            f"equal: {runs[0]} and {runs[1]}",
            "sft: 2 steps, 2 values",
            "trajectories: 2 dumps, 8 samples, 32 tokens, 152 values",
            "metrics: 3 steps, 6 values",
            "positions: 3 steps, 6 values",
            "evaluation: 1 dumps, 1 samples, 4 tokens, 19 values",
            "tensors: 1 files, 2 tensors, 20 bytes",
        ],
    )


def test_the_folder_of_an_earlier_version_s_task_is_apart(runs: tuple[Path, Path]) -> None:
    flipped_bit("task/model/model.safetensors", 12)(runs[1])
    assert compare(*runs)[0] == 0


def test_seconds_may_differ(runs: tuple[Path, Path]) -> None:
    edited("metrics.jsonl", 1, lambda record: record.update({"time/step": 9.0}))(runs[1])
    edited("sft.jsonl", 1, lambda record: record.update({"sft/seconds": 9.0}))(runs[1])
    in_batch("tool_calls", lambda calls: [calls[0] | {"wall_s": 9.0, "exec_s": None, "began_at": 1.0}])(runs[1])
    in_batch("scored_at", lambda _: [1.0, 2.0])(runs[1])
    assert compare(*runs)[0] == 0


def test_dumps_of_resumed_steps_and_checkpoints_are_left_out(runs: tuple[Path, Path]) -> None:
    write(runs[1] / "trajectories" / "discarded_step_000002.parquet", [trajectory(9, 9, 9)])
    write_tensors(runs[1] / "checkpoints" / "step_000002" / "optimizer.safetensors", [4.0])
    assert compare(*runs)[0] == 0


def test_dumps_of_earlier_versions_are_compared(runs: tuple[Path, Path]) -> None:
    """As earlier versions wrote them: typed columns, and all other fields as JSON in one more."""
    columns = ("prompt_id", "sample_index", "reward", "token_ids", "rollout_log_probs", "weight_version")
    for run, reward in zip(runs, (1.0, next_float(1.0)), strict=True):
        shutil.rmtree(run / "trajectories")
        record = trajectory(3, 1, 0) | {"reward": reward}
        row: Record = {name: record.pop(name) for name in columns} | {"other": json.dumps(record)}
        write(run / "trajectories" / "step_000001.parquet", [row])
    named = "trajectories, step 1, trajectory 0, prompt train-3, sample 1, reward: 1.0 against 1.0000000000000002"
    assert compare(*runs)[1][0] == f"first difference: {named}"


@pytest.mark.parametrize(
    "part", ["trajectories", "evaluation", "model", "sft.jsonl", "metrics.jsonl", "positions.jsonl"]
)
def test_a_part_that_one_run_lacks_is_not_equal(runs: tuple[Path, Path], part: str) -> None:
    path = runs[1] / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    status, lines = compare(*runs)
    assert status == 2
    assert lines[1].startswith(f"only in {runs[0]}: {part}")


@pytest.mark.parametrize("part", ["trajectories", "metrics", "tensors"])
def test_what_both_lack_is_not_equal(runs: tuple[Path, Path], part: str) -> None:
    for run in runs:
        for path in {"trajectories": ["trajectories"], "metrics": ["metrics.jsonl"], "tensors": ["model"]}[part]:
            shutil.rmtree(run / path) if (run / path).is_dir() else (run / path).unlink()
    assert compare(*runs)[0] == 2
    assert compare(*runs, only=[name for name in ("trajectories", "metrics", "tensors") if name != part])[0] == 0


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
