"""Trajectory dumps restore exactly, and stage and phase times add up."""

from __future__ import annotations

import itertools
import json
import random
import shutil
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
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.tokens import COLUMNS
from ctpo_megatron.data.trajectory import Group, NoVerdict, Trajectory
from ctpo_megatron.data.trajectory_file import SCHEMA
from ctpo_megatron.tracking import (
    DumpWriter,
    Head,
    Phases,
    discard_dumps,
    read_heads,
    read_stages,
    read_trajectories,
    recorded_trajectories,
    records_at,
    trajectory_files,
    write_trajectories,
)
from tests.support.deadlines import scaled
from tests.tracking.synthetic_run import decode, encode, make_groups


def test_a_dump_restores_trajectories_with_what_is_known_of_them_and_readable_text(tmp_path: Path) -> None:
    """Numbers of rollout and turns exactly, ratios as float32; a prompt may be drawn twice, a field have no column."""
    groups = make_groups(random.Random(0), prompts=3, samples=2, share_right=0.5)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    trajectories[0].turn_rewards = [1 / 3, 1e-17]
    trajectories[2].reward = None
    count = len(trajectories[1])
    ratios = {name: np.linspace(-0.5, 0.5, count, dtype=np.float32) for name in ("log_ratio", "clip_low", "clip_high")}
    extra: dict[int, dict[str, Any]] = {0: {"turn_advantages": [0.5, -0.25]}, 1: {"advantage": -0.5, **ratios}}
    extra |= {2: {"dropped": True}, 3: {"noted": [1, "a"]}, 7: {"advantage": 0.25}}
    path = write_trajectories(tmp_path, 7, [*groups, groups[0]], decode, extra=extra)
    shutil.copyfile(path, path.with_stem("step_000007-mine"))
    assert trajectory_files(tmp_path) == {7: path} and path.name == "step_000007.parquet"
    assert recorded_trajectories(path) == [*trajectories, *groups[0].trajectories]
    rows = read_trajectories(path)
    assert {name: rows[1][name] for name in ratios} == {name: values.tolist() for name, values in ratios.items()}
    assert [row.get("advantage") for row in rows] == [None, -0.5, *[None] * 5, 0.25]
    assert [row.get("dropped", False) for row in rows] == [False, False, True, *[False] * 5]
    assert (rows[0]["turn_rewards"], rows[0]["turn_advantages"]) == ([1 / 3, 1e-17], [0.5, -0.25])
    assert not {"turn_rewards", "turn_advantages"} & rows[1].keys() and rows[3]["noted"] == [1, "a"]
    for row, trajectory in zip(rows, [*trajectories, *trajectories[:2]], strict=True):
        assert {name: row[name] for name in COLUMNS} == {name: getattr(trajectory, name) for name in COLUMNS}
        assert row["answer"] == "2" and row["segments"][0]["kind"] == "prompt"
        assert "".join(segment["text"] for segment in row["segments"]) == decode(row["token_ids"])
    with_call = next(row for row in rows if row["tool_calls"])
    kinds = [(0, "prompt"), (1, "model"), (1, "observation"), (2, "model")]
    assert [(segment["turn"], segment["kind"]) for segment in with_call["segments"]] == kinds


def test_half_a_character_of_a_tool_is_written(tmp_path: Path) -> None:
    (group,) = make_groups(random.Random(0), prompts=1, samples=1, share_right=1.0)
    call = group.trajectories[0].tool_calls[0]
    call.output, call.arguments = "half \ud83d", {"code": "\ud83d"}
    path = write_trajectories(tmp_path, 1, [group], decode)
    (written,) = read_trajectories(path)[0]["tool_calls"]
    assert recorded_trajectories(path) == group.trajectories
    assert (written["output"], written["arguments"]) == ("half ?", {"code": "\ud83d"})


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
    prompts = [group.prompt for group in groups for _ in group.trajectories]
    heads = [
        Head(place, t.prompt_id, p.data_source, p.answer, t.sample_index, t.reward, t.finish_reason, tools, place == 14)
        for place, (t, p) in enumerate(zip(trajectories, prompts, strict=True))
        for tools in [tuple(sorted({call.status for call in t.tool_calls}))]
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
    assert len(pauses) >= 4 * 10_000 // 5000 and all(0 < pause < 1e-3 for pause in pauses)


def test_every_field_of_a_trajectory_has_a_column() -> None:
    judged = Trajectory("p", 0, 0, no_verdict=NoVerdict("timeout", "late"))
    with_turns = Trajectory("p", 0, 0, reward=1.0, turn_rewards=[0.5, 0.5])
    assert judged.facts().keys() | with_turns.facts().keys() <= set(SCHEMA.names)


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
        for number in range(2):
            writer.put(f"dump {number}", partial(write, number))
        assert written == []
        release = threading.Timer(0.05, go.set)
        release.start()
        writer.put("one more", partial(write, 2))  # waits for the first
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


def test_a_character_is_of_its_last_token(tmp_path: Path) -> None:
    """Of a decoder that drops a first space, as those of SentencePiece do, the text alone is there."""

    def decode_bytes(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def segment_of(text: str, decoder: Callable[[list[int]], str]) -> dict[str, Any]:
        dump = write_trajectories(tmp_path, 1, [one_turn([*text.encode()])], decoder)
        (segment,) = read_trajectories(dump)[0]["segments"]
        assert segment["text"] == text
        return segment

    text = "a€ b🙂  \ufffdé" * 5
    segment_of(text, lambda ids: decode_bytes(ids).removeprefix(" "))
    text = text.replace("\ufffd", "")
    lengths = [int(last) for letter in text for last in [0] * (len(letter.encode()) - 1) + [1]]
    assert segment_of(text, decode_bytes)["token_chars"] == lengths


def test_a_decoder_that_depends_on_neighbours_leaves_the_token_lengths_out(tmp_path):
    groups = [one_turn(encode("ab")), one_turn([])]
    path = write_trajectories(tmp_path, 0, groups, lambda ids: decode(ids).strip() + str(len(ids)))
    assert [[part["token_chars"] for part in row["segments"]] for row in read_trajectories(path)] == [[None], []]


def test_phases_accumulate_within_a_step_and_start_anew():
    phases = Phases()
    for _ in range(2):
        with phases.phase("rollout"):
            time.sleep(0.01)
    with pytest.raises(KeyError), phases.phase("update"):
        raise KeyError
    first = phases.metrics()
    assert set(first) == {"time/rollout", "time/rollout_cpu", "time/update", "time/update_cpu"}
    assert 0.02 <= first["time/rollout"] < 5
    assert first["time/rollout_cpu"] < first["time/rollout"]
    assert phases.metrics() == {}


def test_stages_survive_a_resume(tmp_path):
    with Phases(tmp_path).stage("rl"):
        pass
    before = read_stages(tmp_path)["rl"].wall
    with Phases(tmp_path).stage("rl"):
        time.sleep(0.01)
    assert read_stages(tmp_path)["rl"].wall >= before + 0.01
