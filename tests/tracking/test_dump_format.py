"""The documented format of dumps, their export as JSON lines, and recordings of earlier versions."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctpo_megatron import cli
from ctpo_megatron.base.run_paths import EVALUATION
from ctpo_megatron.data.tokens import ROUTER_CHOICES
from ctpo_megatron.data.trajectory import ToolCall, Trajectory
from ctpo_megatron.tracking import read_trajectories, recorded_trajectories, records_at, write_trajectories
from ctpo_megatron.tracking.trajectories import Form, trajectory_of
from tests.support.prefork import ROOT
from tests.tracking.synthetic_run import decode, make_groups, ratio_fields, write_run

PAGE = ROOT / "docs" / "reference" / "dumps.md"
RECORDED = (
    '{"prompt_id": "a-1", "sample_index": 0, "seed": 7, "token_ids": [5, 6, 7, 8], "response_mask": [0, 1, 0, 1], '
    '"loss_mask": [0, 1, 0, 1], "rollout_log_probs": [0.0, -0.30000001192092896, 0.0, -1.25], '
    '"weight_version": [-1, 3, -1, 3], "turn": [0, 1, 1, 2], "finish_reason": "answer", "tool_calls": [{"turn": 1, '
    '"name": "python", "arguments": {"code": "print(1)"}, "status": "success", "output": "1", "wall_s": 0.25, '
    '"exec_s": null}], "final_text": "1", "reward": 1.0, "reward_components": {}, "answer": "1", "data_source": "d", '
    '"segments": [{"turn": 0, "kind": "prompt", "text": "q"}, {"turn": 1, "kind": "model", "text": "c", '
    '"token_chars": [1]}, {"turn": 1, "kind": "observation", "text": "1"}, {"turn": 2, "kind": "model", "text": "1", '
    '"token_chars": [1]}], "advantage": 0.5, "log_ratio": [0.0, 0.1, 0.0, -0.2], "clip_low": [0.0, -1.0, 0.0, -1.0], '
    '"clip_high": [0.0, 1.0, 0.0, 1.0]}\n'
)
"""A line as version 45e9584 wrote it."""


def documented() -> dict[str, str]:
    """Column -> type, of the table in docs/reference/dumps.md."""
    text = PAGE.read_text(encoding="utf-8").split("| column | type |")[1]
    return dict(re.findall(r"^\| `([a-z_.]+)` \| ([a-z0-9_<>, ]+?)(?: \[T\])? \|", text, re.MULTILINE))


def described(kind: pa.DataType) -> str:
    """A type as the table names it."""
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(field.name for field in kind)}>"
    if pa.types.is_map(kind):
        return f"map<{kind.key_type}, {described(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"list<{described(kind.value_type)}>"
    return str(kind)


def test_the_documented_columns_are_the_written_ones(tmp_path: Path) -> None:
    groups = make_groups(random.Random(0), prompts=1, samples=1, share_right=1.0)
    schema = pq.read_schema(write_trajectories(tmp_path, 1, groups, decode))
    written = {field.name: described(field.type) for field in schema}
    for column in ("segments", "tool_calls"):
        fields = {f"{column}.{field.name}": described(field.type) for field in schema.field(column).type.value_type}
        written |= {name: kind for name, kind in fields.items() if name in documented()}
    assert documented() == written
    of_no_token = {"turn_rewards", "turn_advantages", "sequence_starts", "scored_at"}
    lists = {field.name for field in schema if pa.types.is_list(field.type) and "struct" not in str(field.type)}
    tokens = lists - of_no_token
    table = PAGE.read_text(encoding="utf-8")
    assert tokens == set(re.findall(r"^\| `(\w+)` \| list<\w+> \[T\] \|", table, re.MULTILINE))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_further_columns_of_tokens_are_recorded(tmp_path: Path, form: Form) -> None:
    """So a replay has the experts that the engine took. Of two groups, the second was sampled without."""
    groups = make_groups(random.Random(0), prompts=2, samples=2, share_right=0.5)
    for trajectory in groups[0].trajectories:
        rows = np.random.default_rng(len(trajectory)).integers(0, 400, (len(trajectory), 3, 2), np.uint16)
        trajectory.fill(0, {ROUTER_CHOICES: rows})
    path = write_trajectories(tmp_path, 1, groups, decode, form=form)
    expected = [trajectory for group in groups for trajectory in group.trajectories]
    assert recorded_trajectories(path) == expected
    assert ["more" in record for record in read_trajectories(path)] == [True, True, False, False]
    answers = write_trajectories(tmp_path, 1, groups, decode, folder=EVALUATION, form=form)
    assert not any("more" in record for record in read_trajectories(answers))  # no run trains on them
    if form == "parquet":
        assert "more" not in records_at(path, [0])[0]  # what readers of a few trajectories have no use for


def test_a_recording_of_an_earlier_version_is_replayed_and_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text(RECORDED)
    (trajectory,) = recorded_trajectories(path)
    expected = Trajectory("a-1", 0, 7)
    expected.append_context([5], 0)
    expected.append_model([6], [-0.30000001192092896], [3], 1)
    expected.append_context([7], 1)
    expected.append_model([8], [-1.25], [3], 2)
    expected.finish_reason, expected.final_text, expected.reward = "answer", "1", 1.0
    expected.tool_calls = [ToolCall(1, "python", {"code": "print(1)"}, "success", "1", 0.25)]
    assert trajectory == expected


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_the_export_is_what_json_lines_are(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: Any) -> None:
    groups = make_groups(random.Random(0), prompts=3, samples=2, share_right=0.5)
    extra = ratio_fields(random.Random(0), groups)
    for step in (1, 2, 10):
        write_trajectories(tmp_path / "run", step, groups, decode, extra=extra, form=form)
        lines = write_trajectories(tmp_path / "lines", step, groups, decode, extra=extra, form="jsonl")
    write_trajectories(tmp_path / "run", 5, groups[:1], decode, folder="evaluation", form=form)
    expected = [json.loads(line) for line in lines.read_text().splitlines()]

    def exported(*arguments: str) -> list[Any]:
        assert cli.main(["trajectories", str(tmp_path / "run"), *arguments]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    found = exported("--jsonl", "-", "--steps", "2-9,1")
    assert [line.pop("step") for line in found] == [1] * 6 + [2] * 6
    assert found == expected * 2
    assert [trajectory_of(line) for line in found[:6]] == [t for group in groups for t in group.trajectories]
    assert [line["step"] for line in exported("--jsonl", "-", "--evaluations")] == [5, 5]
    file = tmp_path / "all.jsonl"
    assert exported("--jsonl", str(file)) == []
    assert len(file.read_text().splitlines()) == 18


def test_an_export_overwrites_nothing_and_names_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, steps=3)
    (tmp_path / "there.jsonl").write_text("mine")
    for arguments, said in (
        (["--jsonl", str(tmp_path / "there.jsonl")], "exists; nothing is overwritten"),
        (["--jsonl", str(tmp_path / "no" / "there.jsonl")], "is no folder"),
        (["--jsonl", "-", "--steps", "2"], "no step 2 is there, only 1 to 3"),
        (["--jsonl", "-", "--steps", "x"], "'x' is no step and no range"),
    ):
        assert cli.main(["trajectories", str(run), *arguments]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["trajectories", str(tmp_path), "--jsonl", "-"]) == 2
    assert "has no trajectories" in capsys.readouterr().err
    assert (tmp_path / "there.jsonl").read_text() == "mine"
    (run / "trajectories" / "step_000003.parquet").write_bytes(b"PAR1")
    assert cli.main(["trajectories", str(run), "--jsonl", str(tmp_path / "new.jsonl")]) == 2
    assert "step_000003.parquet is damaged" in capsys.readouterr().err
    assert not (tmp_path / "new.jsonl").exists()
