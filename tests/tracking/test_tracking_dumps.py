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
import pytest

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.tracking import (
    DumpWriter,
    PhaseTimer,
    discard_dumps,
    read_trajectories,
    recorded_trajectories,
    trajectory_files,
    trajectory_of,
    write_trajectories,
)
from ctpo_megatron.tracking.timing import read_stages
from ctpo_megatron.tracking.trajectories import WAITING
from tests.support.deadlines import scaled
from tests.tracking.synthetic_run import decode, encode, make_groups


def test_dump_restores_trajectories_and_adds_readable_text(tmp_path):
    groups = make_groups(random.Random(0), prompts=2, samples=3, share_right=0.5)
    path = write_trajectories(tmp_path, 7, groups, decode, extra={1: {"advantage": -0.5}})
    assert path.name == "step_000007.jsonl"
    assert trajectory_files(tmp_path) == {7: path}
    records = read_trajectories(path)
    assert [trajectory_of(record) for record in records] == [t for group in groups for t in group.trajectories]
    assert records[1]["advantage"] == -0.5
    for record in records:
        assert record["answer"] == "2"
        assert record["segments"][0]["kind"] == "prompt"
        assert "".join(segment["text"] for segment in record["segments"]) == decode(record["token_ids"])
    with_call = next(record for record in records if record["tool_calls"])
    assert [(s["turn"], s["kind"]) for s in with_call["segments"]] == [
        (0, "prompt"), (1, "model"), (1, "observation"), (2, "model"),
    ]  # fmt: skip


def test_a_parquet_dump_holds_the_same(tmp_path: Path) -> None:
    """Numbers of the rollout exactly, ratios as float32 where JSON lines have six decimals."""
    groups = make_groups(random.Random(0), prompts=3, samples=2, share_right=0.5)
    groups[1].trajectories[0].reward = None
    count = len(groups[0].trajectories[1])
    ratios = {name: np.linspace(-0.5, 0.5, count, dtype=np.float32) for name in ("log_ratio", "clip_low", "clip_high")}
    extra = {1: {"advantage": -0.5, **ratios}, 2: {"dropped": True}}
    lines, rows = (
        read_trajectories(write_trajectories(tmp_path / form, 7, groups, decode, extra=extra, form=form))
        for form in ("jsonl", "parquet")
    )
    assert [trajectory_of(row) for row in rows] == [t for group in groups for t in group.trajectories]
    assert trajectory_files(tmp_path / "parquet") == {7: tmp_path / "parquet/trajectories/step_000007.parquet"}
    for name in ratios:
        assert rows[1][name] == pytest.approx(lines[1].pop(name), abs=1e-6)
        assert rows[1].pop(name) == ratios[name].tolist()
    assert rows == lines


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_dump_is_a_recording_as_it_was_written(tmp_path: Path, form: str) -> None:
    groups = make_groups(random.Random(0), prompts=2, samples=2, share_right=0.5)
    path = write_trajectories(tmp_path, 1, groups, decode, form=form)
    assert recorded_trajectories(path) == [t for group in groups for t in group.trajectories]
    shutil.copyfile(path, path.with_stem("step_000001-mine"))
    assert trajectory_files(tmp_path) == {1: path}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("rollout_log_probs", lambda values: values[:-1], "its lists differ in length"),
        ("turn", lambda values: [], "its lists differ in length"),
        ("token_ids", lambda values: [*values[:-1], 1.5], r"token_ids holds 1\.5"),
        ("token_ids", lambda values: [*values[:-1], "3"], "token_ids holds '3'"),
        ("response_mask", lambda values: [2 * value for value in values], "response_mask holds 2"),
        ("rollout_log_probs", lambda values: [*values[:-1], float("nan")], "rollout_log_probs holds nan"),
        ("rollout_log_probs", lambda values: [*values[:-1], None], "rollout_log_probs holds None"),
        ("final_text", lambda text: None, "final_text is None"),
        ("tool_calls", lambda calls: None, "not iterable"),
        ("seed", lambda seed: ..., "missing 1 required positional argument: 'seed'"),
    ],
)
def test_a_recording_that_was_edited_badly_is_named(
    tmp_path: Path, name: str, change: Callable[[Any], Any], said: str
) -> None:
    groups = make_groups(random.Random(0), prompts=1, samples=2, share_right=0.5)
    path = write_trajectories(tmp_path, 1, groups, decode)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    if (value := change(second.pop(name))) is not ...:
        second[name] = value
    path.write_text("".join(json.dumps(record) + "\n" for record in (first, second)))
    with pytest.raises(DamagedFileError, match=rf"step_000001\.jsonl, \w+ 2, .*{said}"):
        recorded_trajectories(path)


def test_a_large_parquet_dump_tells_few_tokens_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctpo_megatron.tracking.trajectories.TOLD_APART", 1)
    monkeypatch.setattr("ctpo_megatron.tracking.parquet_dump._GROUP_TOKENS", 1)  # a row group each
    groups = make_groups(random.Random(0), prompts=2, samples=1, share_right=0.5)
    rows = read_trajectories(write_trajectories(tmp_path, 1, groups, decode, form="parquet"))
    told = [any("token_chars" in segment for segment in row["segments"]) for row in rows]
    assert told == [True, False]
    assert [trajectory_of(row) for row in rows] == [group.trajectories[0] for group in groups]


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
        content = last.read_text()
        discard_dumps(tmp_path, after=2)
    for folder in ("trajectories", "evaluation"):
        assert list(trajectory_files(tmp_path, folder)) == [2]
        assert (tmp_path / folder / "discarded_step_000003.jsonl").read_text() == content


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


def test_a_decoder_that_depends_on_neighbours_leaves_the_token_lengths_out(tmp_path):
    path = write_trajectories(tmp_path, 0, [one_turn(encode("ab"))], lambda ids: decode(ids).strip() + str(len(ids)))
    assert "token_chars" not in read_trajectories(path)[0]["segments"][0]


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
        "print([m for m in ('torch', 'matplotlib', 'jinja2', 'tensorboard', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
