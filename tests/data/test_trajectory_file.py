"""A trajectory in a file: exact, whatever it has; and what is said of files that hold something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.run_paths import AHEAD, AHEAD_JSON
from ctpo_megatron.data import TOOL_STATUSES, ToolCall, Trajectory
from ctpo_megatron.data.records import NoVerdict
from ctpo_megatron.data.tokens import ROUTER_CHOICES, TOKEN, records
from ctpo_megatron.data.trajectory_file import encode_ahead, read_ahead
from ctpo_megatron.tracking import read_trajectories, recorded_trajectories
from tests.support.recorded import groups_of_a567bdb6, through_a_file

DUMP = Path(__file__).with_name("dump_a567bdb6.parquet")
CHARACTERS = st.characters() | st.sampled_from("\ud83d\ude00")
TEXTS = st.text(CHARACTERS, max_size=8).filter(lambda text: json.loads(json.dumps(text)) == text)
"""With halves of characters; two that are a whole one are that in JSON."""
NUMBERS = st.floats(allow_nan=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
SECONDS = st.none() | NUMBERS
CALLS = st.builds(
    ToolCall,
    *(st.integers(0, 9), TEXTS, st.dictionaries(TEXTS, VALUES, max_size=3), st.sampled_from(TOOL_STATUSES), TEXTS),
    *(NUMBERS, SECONDS, SECONDS),
)
FURTHER = st.dictionaries(
    st.sampled_from([ROUTER_CHOICES, "scores", "é"]),
    st.tuples(st.sampled_from(["u1", "<u2", "<f2", ">i4", "<f8"]), st.sampled_from([(), (2,), (3, 2), (0,)])),
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any tokens, NaN among them, and any facts."""
    length, bits = draw(st.integers(0, 9)), np.random.default_rng(draw(st.integers(0, 2**32)))

    def random(kind: Any, shape: tuple[int, ...] = ()) -> np.ndarray[Any, Any]:
        size = length * int(np.prod(shape)) * np.dtype(kind).itemsize
        return np.frombuffer(bits.bytes(size), kind).reshape(length, *shape)

    tokens = records(length, {name: random(*about) for name, about in draw(FURTHER).items()})
    for name in TOKEN.names or ():
        tokens[name] = random(TOKEN[name]) % 2 if name.endswith("_mask") else random(TOKEN[name])
    return Trajectory(
        draw(TEXTS),
        draw(st.integers(0, 2**31 - 1)),
        draw(st.integers(-(2**63), 2**63 - 1)),
        tokens,
        draw(st.sampled_from([None, "answer", "length", "max_turns", "tool_budget"])),
        draw(st.lists(CALLS, max_size=3)),
        draw(TEXTS),
        draw(SECONDS),
        draw(st.dictionaries(TEXTS, NUMBERS, max_size=3)),
        draw(st.none() | st.builds(NoVerdict, st.sampled_from(["timeout", "crash"]), TEXTS)),
        draw(st.none() | st.lists(NUMBERS, max_size=3)),
        sorted(draw(st.sets(st.integers(1, length - 1)))) if length > 1 else [],
        draw(st.none() | st.lists(NUMBERS, max_size=2)),
    )


@given(st.lists(trajectories(), max_size=4))
@settings(deadline=None)
def test_what_is_read_is_what_was_written(made: list[Trajectory]) -> None:
    kept = through_a_file(made)
    assert kept == made
    assert [repr(each.facts()) for each in kept] == [repr(each.facts()) for each in made]  # also the sign of a zero


def test_a_dump_of_commit_a567bdb6_is_read_exactly() -> None:
    (group,) = groups_of_a567bdb6()
    assert recorded_trajectories(DUMP) == group.trajectories == through_a_file(group.trajectories)
    first, second, third, fourth = read_trajectories(DUMP)
    assert "".join(part["text"] for part in first["segments"]) == "".join(map(chr, first["token_ids"]))
    assert (first["advantage"], first["turn_advantages"], first["answer"]) == (0.5, [0.5, -0.5], "4")
    assert len(first["log_ratio"]) == 10 and "log_ratio" not in second and fourth["noted"] == [1, "a"]
    assert second["no_verdict"] == {"cause": "timeout", "reason": "later than 10 s"} and second["reward"] is None
    assert third["dropped"] and third["sequence_starts"] == [3, 8] and third["finish_reason"] is None


def ahead(*trajectories: Trajectory) -> dict[str, Any]:
    waiting = {"prompt": "q", "occurrence": 1}
    group = {"prompt": "p", "trajectories": list(trajectories), "report": {"seconds": 0.5}}
    return {"shape": [1, 2], "settled": {"trained": 3}, "batches": [{"step": 4, "groups": [waiting, group]}]}


def made() -> Trajectory:
    return groups_of_a567bdb6()[0].trajectories[0]


def test_what_is_sampled_ahead_survives_a_checkpoint(tmp_path: Path) -> None:
    assert read_ahead(tmp_path) is None
    for state in (ahead(*groups_of_a567bdb6()[0].trajectories), {**ahead(), "batches": []}):
        (tmp_path / AHEAD).write_bytes(encode_ahead(state))
        assert read_ahead(tmp_path) == state
    with pytest.raises(TypeError, match="is not JSON"):
        encode_ahead({"batches": [Path()]})


@pytest.mark.parametrize("name", [AHEAD, AHEAD_JSON])
def test_groups_of_an_earlier_version_are_refused(tmp_path: Path, name: str) -> None:
    former = pa.table({"facts": ["{}"], "length": pa.array([0], pa.int32())})
    pq.write_table(former.replace_schema_metadata({"state": json.dumps(ahead())}), tmp_path / name)
    said = rf"{name} holds groups that an earlier version has sampled ahead.* finish the run with .* model\.path"
    with pytest.raises(ValueError, match=said) as raised:
        read_ahead(tmp_path)
    assert not isinstance(raised.value, DamagedFileError)


def test_a_checkpoint_of_an_earlier_version_without_groups_is_continued(tmp_path: Path) -> None:
    former = pa.table({"facts": pa.array([], pa.string()), "length": pa.array([], pa.int32())})
    state = {**ahead(), "batches": []}
    pq.write_table(former.replace_schema_metadata({"state": json.dumps(state)}), tmp_path / AHEAD)
    assert read_ahead(tmp_path) == state


def further(**change: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {"more": [(ROUTER_CHOICES, dict(row["more"])[ROUTER_CHOICES] | change)]}


Row = dict[str, Any]
STATES = ["[" * 100_000, "[]", '"x"', '{"trajectory": 1}', '{"a": {"trajectory": []}}', None]
"""Too deep, a list, a text, a row that is not there, no number, and none at all."""
HOSTILE: dict[str, Callable[[Row], Row]] = {
    "objects": further(type="|O"),
    "a type that is none": further(type="import os"),
    "huge": further(shape=[2**31 - 1] * 3),
    "wider": further(shape=[2, 3]),
    "no bytes": further(data=None),
    "fewer tokens": lambda row: {"turn": row["turn"][:-1]},
    "no tokens": lambda row: {"turn": None},
    "half a call": lambda row: {"tool_calls": [row["tool_calls"][0] | {"arguments": "{"}]},
    "starts beyond": lambda row: {"sequence_starts": [3, 99]},
    "another other": lambda row: {"other": "[]"},
    "deep": lambda row: {"other": "[" * 100_000},
    **{f"state {str(state)[:8]}": lambda row, state=state: {"state": state} for state in STATES},
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of one trajectory that was sampled ahead."""
    (tmp_path / AHEAD).write_bytes(encode_ahead(ahead(made())))
    return tmp_path / AHEAD


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_row_or_state_is_named(written: Path, change: Callable[[Row], Row]) -> None:
    table = pq.read_table(written)
    (row,) = table.to_pylist()
    changed = row | change(row)
    metadata = table.schema.metadata
    if "state" in changed:
        state = changed.pop("state")
        metadata = {} if state is None else {"state": state}
    pq.write_table(pa.Table.from_pylist([changed], table.schema.with_metadata(metadata)), written)
    with pytest.raises(DamagedFileError, match=r"ahead\.parquet is damaged"):
        read_ahead(written.parent)


def test_a_file_that_is_cut_off_is_named(written: Path) -> None:
    written.write_bytes(written.read_bytes()[:-30])
    with pytest.raises(DamagedFileError, match=r"ahead\.parquet is damaged"):
        read_ahead(written.parent)


@pytest.mark.parametrize("name", ["token_ids", "rollout_log_probs"])
def test_a_missing_or_strange_column_is_named(written: Path, name: str) -> None:
    table = pq.read_table(written)
    texts = table.set_column(table.schema.get_field_index(name), name, pa.array([["1"] * len(made())]))
    for changed, message in ((table.drop_columns([name]), name), (texts, f"{name} is a column of string")):
        pq.write_table(changed, written)
        with pytest.raises(DamagedFileError, match=message):
            read_ahead(written.parent)


def test_pandas_reads_what_is_sampled_ahead(written: Path) -> None:
    (row,) = pd.read_parquet(written).to_dict("records")
    assert row["prompt_id"] == "p-1" and row["token_ids"].tolist() == made().token_ids


def test_a_machine_without_memory_is_not_called_damage(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyarrow.parquet.ParquetFile.read_row_group", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        read_ahead(written.parent)
