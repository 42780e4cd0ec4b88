"""Trajectory dumps restore exactly, and stage and phase times add up."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.tokens import COLUMNS
from ctpo_megatron.data.trajectory import NoVerdict, Trajectory
from ctpo_megatron.data.trajectory_file import SCHEMA
from ctpo_megatron.tracking import (
    DumpWriter,
    PhaseTimer,
    discard_dumps,
    read_trajectories,
    recorded_trajectories,
    trajectory_files,
    write_trajectories,
)
from ctpo_megatron.tracking.dump_writer import WAITING
from ctpo_megatron.tracking.records import AT_ONCE, Head
from ctpo_megatron.tracking.segments import Texts
from ctpo_megatron.tracking.timing import read_stages
from ctpo_megatron.tracking.trajectories import read_heads, records_at
from tests.support.deadlines import scaled
from tests.tracking.synthetic_run import decode, encode, make_groups


def test_dump_restores_trajectories_and_adds_readable_text(tmp_path):
    groups = make_groups(random.Random(0), prompts=2, samples=3, share_right=0.5)
    path = write_trajectories(tmp_path, 7, groups, decode, extra={1: {"advantage": -0.5}})
    assert path.name == "step_000007.parquet"
    assert trajectory_files(tmp_path) == {7: path}
    records = read_trajectories(path)
    assert recorded_trajectories(path) == [t for group in groups for t in group.trajectories]
    assert records[1]["advantage"] == -0.5
    for record in records:
        assert record["answer"] == "2"
        assert record["segments"][0]["kind"] == "prompt"
        assert "".join(segment["text"] for segment in record["segments"]) == decode(record["token_ids"])
    with_call = next(record for record in records if record["tool_calls"])
    assert [(s["turn"], s["kind"]) for s in with_call["segments"]] == [
        (0, "prompt"), (1, "model"), (1, "observation"), (2, "model"),
    ]  # fmt: skip


def test_a_dump_holds_the_trajectories_and_what_is_known_of_them(tmp_path: Path) -> None:
    """Numbers of the rollout exactly, ratios as float32."""
    groups = make_groups(random.Random(0), prompts=3, samples=2, share_right=0.5)
    groups[1].trajectories[0].reward = None
    count = len(groups[0].trajectories[1])
    ratios = {name: np.linspace(-0.5, 0.5, count, dtype=np.float32) for name in ("log_ratio", "clip_low", "clip_high")}
    extra = {1: {"advantage": -0.5, **ratios}, 2: {"dropped": True}}
    path = write_trajectories(tmp_path, 7, groups, decode, extra=extra)
    rows = read_trajectories(path)
    assert recorded_trajectories(path) == [t for group in groups for t in group.trajectories]
    assert {name: rows[1][name] for name in ratios} == {name: values.tolist() for name, values in ratios.items()}
    assert (rows[1]["advantage"], rows[2]["dropped"]) == (-0.5, True) and not rows[0]["dropped"]


def test_a_dump_is_a_recording_as_it_was_written(tmp_path: Path) -> None:
    groups = make_groups(random.Random(0), prompts=2, samples=2, share_right=0.5)
    path = write_trajectories(tmp_path, 1, groups, decode)
    assert recorded_trajectories(path) == [t for group in groups for t in group.trajectories]
    shutil.copyfile(path, path.with_stem("step_000001-mine"))
    assert trajectory_files(tmp_path) == {1: path}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("rollout_log_probs", lambda values: values[:-1], "its lists differ in length"),
        ("turn", lambda values: [], "its lists differ in length"),
        ("response_mask", lambda values: [2 * value for value in values], "response_mask holds 2"),
        ("rollout_log_probs", lambda values: [*values[:-1], float("nan")], "rollout_log_probs holds nan"),
        ("rollout_log_probs", lambda values: [*values[:-1], None], "rollout_log_probs holds None"),
        ("loss_mask", lambda values: [*values[:-1], -1], "loss_mask holds -1"),
        ("turn", lambda values: [*values[:-1], 2**15], "turn holds 32768"),
        ("final_text", lambda text: None, "final_text is None"),
    ],
)
def test_a_recording_that_was_edited_badly_is_named(
    tmp_path: Path, name: str, change: Callable[[Any], Any], said: str
) -> None:
    groups = make_groups(random.Random(0), prompts=1, samples=2, share_right=0.5)
    path = write_trajectories(tmp_path, 1, groups, decode)
    table = pq.read_table(path)
    first, second = table.to_pylist()
    pq.write_table(pa.Table.from_pylist([first, second | {name: change(second[name])}], table.schema), path)
    with pytest.raises(DamagedFileError, match=rf"step_000001\.parquet is damaged \(.*trajectory 2: {said}"):
        recorded_trajectories(path)


def test_every_row_group_holds_whole_trajectories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers get the heads of all, and the rows that they choose, from any of them."""
    monkeypatch.setattr("ctpo_megatron.data.trajectory_file._GROUP_TOKENS", 400)
    groups = make_groups(random.Random(0), prompts=5, samples=3, share_right=0.5)
    groups[3].trajectories[1].reward = None
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    traces = {"log_ratio": np.zeros(len(trajectories[14]), np.float32)}
    path = write_trajectories(tmp_path, 1, groups, decode, extra={14: traces})
    assert 2 < pq.ParquetFile(path).num_row_groups < len(trajectories)
    heads = [
        Head(
            place, t.prompt_id, t.sample_index, t.reward, "", t.finish_reason, tools, sum(t.response_mask), place == 14
        )
        for place, t in enumerate(trajectories)
        for tools in [" ".join(sorted({call.status for call in t.tool_calls}))]
    ]
    assert read_heads(path) == heads
    records = read_trajectories(path)
    assert recorded_trajectories(path) == trajectories
    assert all(segment["token_chars"] for record in records for segment in record["segments"][1::2])
    for places in ([14, 0, 7, 8], [3], []):
        assert records_at(path, places) == [records[place] for place in places]


def test_a_dump_gives_way_to_other_threads_every_few_thousand_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[float]()
    monkeypatch.setattr("ctpo_megatron.tracking.records.time.sleep", pauses.append)
    groups = [one_turn([97] * 10_000) for _ in range(4)]
    write_trajectories(tmp_path, 1, groups, decode)
    assert len(pauses) >= 4 * 10_000 // AT_ONCE and all(0 < pause < 1e-3 for pause in pauses)


def test_every_field_of_a_trajectory_has_a_column() -> None:
    judged = Trajectory("p", 0, 0, no_verdict=NoVerdict("timeout", "late"))
    with_turns = Trajectory("p", 0, 0, reward=1.0, turn_rewards=[0.5, 0.5])
    assert judged.facts().keys() | with_turns.facts().keys() <= set(SCHEMA.names)


def test_what_turns_earned_is_kept_exactly_and_only_where_it_is_known(tmp_path: Path) -> None:
    (group,) = make_groups(random.Random(0), prompts=1, samples=2, share_right=0.5)
    group.trajectories[0].turn_rewards = [1 / 3, 1e-17]
    path = write_trajectories(tmp_path, 1, [group], decode, extra={0: {"turn_advantages": [0.5, -0.25]}})
    one, other = read_trajectories(path)
    assert (one["turn_rewards"], one["turn_advantages"]) == ([1 / 3, 1e-17], [0.5, -0.25])
    assert not {"turn_rewards", "turn_advantages"} & other.keys()
    assert recorded_trajectories(path) == group.trajectories


def test_a_dump_holds_the_columns_of_the_tokens(tmp_path: Path) -> None:
    (group,) = make_groups(random.Random(0), prompts=1, samples=2, share_right=0.5)
    table = read_trajectories(write_trajectories(tmp_path, 1, [group], decode))
    for record, trajectory in zip(table, group.trajectories, strict=True):
        assert {name: record[name] for name in COLUMNS} == {name: getattr(trajectory, name) for name in COLUMNS}


def test_a_field_without_a_column_and_half_a_character_are_written(tmp_path: Path) -> None:
    (group,) = make_groups(random.Random(0), prompts=1, samples=1, share_right=1.0)
    call = group.trajectories[0].tool_calls[0]
    call.output, call.arguments = "half \ud83d", {"code": "\ud83d"}
    path = write_trajectories(tmp_path, 1, [group], decode, extra={0: {"noted": [1, "a"]}})
    (record,) = read_trajectories(path)
    assert recorded_trajectories(path) == group.trajectories
    assert record["noted"] == [1, "a"]
    assert record["tool_calls"][0]["output"] == "half ?" and record["tool_calls"][0]["arguments"] == {"code": "\ud83d"}


def test_fields_without_a_column_are_read_from_the_json_in_other(tmp_path: Path) -> None:
    (group,) = make_groups(random.Random(0), prompts=1, samples=2, share_right=0.5)
    written = read_trajectories(write_trajectories(tmp_path / "now", 1, [group], decode))
    typed = ["prompt_id", "sample_index", "finish_reason", "reward", "data_source", "answer", "final_text"]
    tokens = ["token_ids", "response_mask", "loss_mask", "rollout_log_probs", "weight_version", "turn"]
    rows = []
    for record in written:
        row = {name: record.pop(name) for name in typed + tokens} | {"log_ratio": None, "clip_low": None}
        rows.append(row | {"other": json.dumps(record)})
        record.update(row)
        del record["log_ratio"], record["clip_low"]
    path = tmp_path / "step_000001.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert read_trajectories(path) == written
    assert recorded_trajectories(path) == group.trajectories
    with pytest.raises(DamagedFileError, match="tool_calls"):  # which heads need as a column
        read_heads(path)


def test_dumps_are_written_in_order_behind_the_caller_and_no_more_wait_than_fit(tmp_path: Path) -> None:
    written, go = list[int](), threading.Event()

    def write(number: int) -> Path:
        assert go.wait(scaled(30))
        written.append(number)
        return tmp_path

    with closing(DumpWriter()) as writer:
        for number in range(WAITING):
            writer.put(f"dump {number}", partial(write, number))
        assert written == []
        release = threading.Timer(0.05, go.set)
        release.start()
        writer.put("one more", partial(write, WAITING))  # waits for the first
        assert written[0] == 0
        writer.flush()
        assert written == [0, 1, 2]
        assert 0 < writer.take_cpu_s() < scaled(1) and writer.take_cpu_s() == 0


def test_a_dump_that_does_not_end_costs_the_deadline_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ctpo_megatron.tracking.dump_writer.DEADLINE_S", 0.1)
    go = threading.Event()

    def hang() -> Path:
        assert go.wait(scaled(30))
        return tmp_path

    with closing(DumpWriter()) as writer:
        writer.put("one", hang)
        writer.put("two", lambda: tmp_path)
        writer.flush()
        assert writer.take_failures() == 2 and writer.take_failures() == 0
        writer.put("three", lambda: tmp_path)
        assert writer.take_failures() == 1
        go.set()
        assert writer._stuck is not None and writer._stuck.result(scaled(30)) == tmp_path
        monkeypatch.setattr("ctpo_megatron.tracking.dump_writer.DEADLINE_S", scaled(30))
        writer.put("four", lambda: tmp_path / 0)  # type: ignore[operator]
        writer.put("five", lambda: tmp_path)
        writer.flush()
        assert writer.take_failures() == 1
    said = [record.message for record in caplog.records if "training continues" in record.message]
    assert [text.split()[0] for text in said] == ["one", "two", "three", "four"]
    assert "not within 0.1 s: is the file system there?" in said[0] and "TypeError" in said[3]


def test_a_prompt_that_was_drawn_twice_keeps_what_each_trajectory_adds(tmp_path):
    (group,) = make_groups(random.Random(0), prompts=1, samples=1, share_right=0.5)
    extra = {place: {"advantage": float(place)} for place in range(2)}
    records = read_trajectories(write_trajectories(tmp_path, 1, [group, group], decode, extra=extra))
    assert [record["advantage"] for record in records] == [0.0, 1.0]


def test_dumps_of_a_course_that_is_discarded_are_kept_out_of_sight(tmp_path):
    for share in (0.0, 1.0):
        groups = make_groups(random.Random(0), prompts=1, samples=1, share_right=share)
        for folder, step in itertools.product(("trajectories", "evaluation"), (2, 3)):
            last = write_trajectories(tmp_path, step, groups, decode, folder=folder)
        content = last.read_bytes()
        discard_dumps(tmp_path, after=2)
    for folder in ("trajectories", "evaluation"):
        assert list(trajectory_files(tmp_path, folder)) == [2]
        assert (tmp_path / folder / "discarded_step_000003.parquet").read_bytes() == content


def one_turn(ids: list[int]) -> Group:
    trajectory = Trajectory("p", 0, 0)
    trajectory.append_model(ids, [0.0] * len(ids), [0] * len(ids), 1)
    return Group(Prompt("p", "s", (), "", ()), [trajectory])


@pytest.mark.parametrize(
    ("text", "chars"), [("a€b", [1, 0, 0, 1, 1]), ("🙂", [0, 0, 0, 1]), ("", None), ("a\ufffdb", [1, 0, 0, 1, 1])]
)
def test_a_character_of_several_byte_tokens_counts_for_the_last(tmp_path, text, chars):
    def decode_bytes(ids):
        return bytes(ids).decode("utf-8", errors="replace")

    path = write_trajectories(tmp_path, 0, [one_turn(list(text.encode()))], decode_bytes)
    segments = read_trajectories(path)[0]["segments"]
    if chars is None:
        assert segments == []
    else:
        got = segments[0].get("token_chars")
        assert got is None or (sum(got) == len(text) and len(got) == len(text.encode()))
        if "\ufffd" not in text:
            assert got == chars


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 100])
def test_a_long_text_is_decoded_in_parts_without_a_trace(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Also by a decoder that drops a first space, as those of SentencePiece do."""

    def decode_bytes(ids):
        return bytes(ids).decode("utf-8", errors="replace")

    monkeypatch.setattr("ctpo_megatron.tracking.segments.AT_ONCE", at_once)
    text = "a€ b🙂  \ufffdé" * 5
    columns = [*text.encode()], [1] * len(text.encode()), [1] * len(text.encode())
    (segment,) = Texts(lambda ids: decode_bytes(ids).removeprefix(" ")).segments(*columns)
    assert segment["text"] == text
    text = text.replace("\ufffd", "")
    columns = [*text.encode()], [1] * len(text.encode()), [1] * len(text.encode())
    (segment,) = Texts(decode_bytes).segments(*columns)
    assert segment["text"] == text
    assert segment["token_chars"].tolist() == [
        int(last) for letter in text for last in [0] * (len(letter.encode()) - 1) + [1]
    ]


def test_a_decoder_that_depends_on_neighbours_leaves_the_token_lengths_out(tmp_path):
    path = write_trajectories(tmp_path, 0, [one_turn(encode("ab"))], lambda ids: decode(ids).strip() + str(len(ids)))
    assert read_trajectories(path)[0]["segments"][0]["token_chars"] is None


def test_phases_accumulate_within_a_step_and_start_anew():
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("rollout"):
            time.sleep(0.01)
    with pytest.raises(KeyError), timer.phase("update"):
        raise KeyError
    first = timer.metrics()
    assert set(first) == {"time/rollout", "time/rollout_cpu", "time/update", "time/update_cpu"}
    assert 0.02 <= first["time/rollout"] < 5
    assert first["time/rollout_cpu"] < first["time/rollout"]
    assert timer.metrics() == {}
    assert timer.phases["rollout"].wall == first["time/rollout"]


def test_stages_survive_a_resume(tmp_path):
    with PhaseTimer(tmp_path).stage("rl"):
        pass
    before = read_stages(tmp_path)["rl"].wall
    with PhaseTimer(tmp_path).stage("rl"):
        time.sleep(0.01)
    assert read_stages(tmp_path)["rl"].wall >= before + 0.01


def test_importing_the_room_pulls_in_nothing_heavy():
    code = (
        "import sys, ctpo_megatron.tracking;"
        "print([m for m in ('torch', 'vl_convert', 'jinja2', 'tensorboard', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
