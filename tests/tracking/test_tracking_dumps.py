"""Trajectory dumps restore exactly, and stage and phase times add up."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time

import pytest

from ctpo_megatron.data.records import Group, Prompt, Trajectory
from ctpo_megatron.tracking import (
    PhaseTimer,
    discard_dumps,
    read_trajectories,
    trajectory_files,
    trajectory_of,
    write_trajectories,
)
from ctpo_megatron.tracking.timing import read_stages
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
