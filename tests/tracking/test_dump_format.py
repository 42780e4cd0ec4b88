"""The documented format of dumps, and what is said of those of earlier versions."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.run_paths import EVALUATION
from ctpo_megatron.data.tokens import ROUTER_CHOICES
from ctpo_megatron.tracking import (
    read_heads,
    read_trajectories,
    recorded_trajectories,
    trajectory_files,
    write_trajectories,
)
from tests.support.prefork import ROOT
from tests.tracking.synthetic_run import decode, make_groups


def documented() -> dict[str, str]:
    """Column -> type, of the table in docs/reference/dumps.md."""
    text = (ROOT / "docs" / "reference" / "dumps.md").read_text(encoding="utf-8").split("| column | type |")[1]
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
    text = (ROOT / "docs" / "reference" / "dumps.md").read_text(encoding="utf-8")
    assert tokens == set(re.findall(r"^\| `(\w+)` \| list<\w+> \[T\] \|", text, re.MULTILINE))


def test_further_columns_of_tokens_are_recorded(tmp_path: Path) -> None:
    """So a replay has the experts that the engine took. Of two groups, the second was sampled without."""
    groups = make_groups(random.Random(0), prompts=2, samples=2, share_right=0.5)
    for trajectory in groups[0].trajectories:
        rows = np.random.default_rng(len(trajectory)).integers(0, 400, (len(trajectory), 3, 2), np.uint16)
        trajectory.fill(0, {ROUTER_CHOICES: rows})
    path = write_trajectories(tmp_path, 1, groups, decode)
    expected = [trajectory for group in groups for trajectory in group.trajectories]
    assert recorded_trajectories(path) == expected
    assert pq.read_table(path)["more"].is_null().to_pylist() == [False, False, True, True]
    answers = write_trajectories(tmp_path, 1, groups, decode, folder=EVALUATION)
    assert all(pq.read_table(answers)["more"].is_null().to_pylist())  # no run trains on them
    assert "more" not in read_trajectories(path)[0]  # what readers of records have no use for


def test_a_dump_of_json_lines_is_refused_with_the_commit_that_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "trajectories" / "step_000001.jsonl"
    path.parent.mkdir()
    path.write_text('{"prompt_id": "a-1"}\n', encoding="utf-8")
    assert trajectory_files(tmp_path) == {1: path}
    for read in (recorded_trajectories, read_trajectories, read_heads):
        with pytest.raises(DamagedFileError, match=r"step_000001\.jsonl: dumps of JSON lines .* commit .* [0-9a-f]{8}"):
            read(path)
