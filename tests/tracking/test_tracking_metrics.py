"""metrics.jsonl: one object a step, through non-finite values, crashes and resumes."""

from __future__ import annotations

import json
import logging

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ctpo_megatron.tracking import MetricsWriter, open_trackers, read_metrics


def test_one_object_a_step_with_sorted_keys(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(0, {"val/a/acc/mean@1": 0.5})
        writer.log(1, {"reward/mean": 1, "actor/lr": 1e-6})
        lines = writer.path.read_text().splitlines()  # flushed while the run is still going
    assert list(json.loads(lines[1])) == ["step", "actor/lr", "reward/mean"]
    assert read_metrics(tmp_path) == [
        {"step": 0, "val/a/acc/mean@1": 0.5},
        {"step": 1, "actor/lr": 1e-6, "reward/mean": 1},
    ]


def test_nonfinite_values_are_null_and_counted(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"a/x": float("nan"), "a/y": float("inf"), "a/z": 2.0})
    assert read_metrics(tmp_path) == [{"step": 1, "a/x": None, "a/y": None, "a/z": 2.0, "tracking/nonfinite": 2}]


def test_a_second_call_for_the_step_adds_to_its_line(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"a/x": 1})
        writer.log(2, {"a/x": 2})
        writer.log(2, {"b/y": 3, "a/x": 4})
        writer.log(2, {"c/z": 6})
        writer.log(3, {"a/x": 5})
    assert read_metrics(tmp_path) == [
        {"step": 1, "a/x": 1}, {"step": 2, "a/x": 4, "b/y": 3, "c/z": 6}, {"step": 3, "a/x": 5},
    ]  # fmt: skip


def test_a_step_before_the_latest_is_refused(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(5, {"a/x": 1})
        with pytest.raises(ValueError, match="truncate_after"):
            writer.log(4, {"a/x": 1})


@pytest.mark.parametrize("whole", [0, 1])
def test_a_half_written_last_line_is_left_out_and_said(tmp_path, caplog, whole):
    assert read_metrics(tmp_path) == []
    records = [{"step": 1, "a/x": 1.0}][:whole]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 2, "a/')
    with caplog.at_level(logging.WARNING):
        assert read_metrics(tmp_path) == records
    assert "incomplete" in caplog.text
    with MetricsWriter(tmp_path) as writer:  # the next line is not glued to the torn one
        writer.log(2, {"a/x": 2})
    assert read_metrics(tmp_path) == [*records, {"step": 2, "a/x": 2}]


def test_resume_drops_what_will_be_written_again(tmp_path, config_in):
    with open_trackers(config_in(), tmp_path) as trackers, MetricsWriter(tmp_path, trackers) as writer:
        for step in range(5):
            writer.log(step, {"a/x": step})
    with open_trackers(config_in(), tmp_path) as trackers, MetricsWriter(tmp_path, trackers) as writer:
        writer.truncate_after(2)
        assert writer.latest["step"] == 2 and len(read_metrics(tmp_path)) == 3
        writer.log(3, {"a/x": 30})
    assert [record["a/x"] for record in read_metrics(tmp_path)] == [0, 1, 2, 30]
    assert [record["a/x"] for record in read_metrics(tmp_path, "discarded_metrics.jsonl")] == [3, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("a/x")] == [0, 1, 2, 30]


def test_lines_discarded_at_another_time_are_added(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.truncate_after(-1)
        assert not (tmp_path / "discarded_metrics.jsonl").exists()
        for value in (1, 2):
            writer.log(1, {"a/x": value})
            writer.truncate_after(0)
    assert [record["a/x"] for record in read_metrics(tmp_path, "discarded_metrics.jsonl")] == [1, 2]


def test_resume_restores_the_line_that_a_kill_cut_off(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(3):
            writer.log(step, {"a/x": step})
        saved = writer.latest
        writer.log(2, {"time/checkpoint": 1})
        writer._file.truncate(writer._last_offset)  # killed while the time was being added
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]
    with MetricsWriter(tmp_path) as writer:
        writer.truncate_after(2, saved)
        writer.log(2, {"b/y": 1})
        writer.log(3, {"a/x": 3})
    assert [record["a/x"] for record in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert read_metrics(tmp_path)[2] == {"step": 2, "a/x": 2, "b/y": 1}


def test_another_stage_writes_its_own_file_and_events(tmp_path, config_in):
    for values in ((2.0, 1.5, 1.0), (3.0,)):  # the second attempt ended earlier
        with open_trackers(config_in(), tmp_path) as trackers, MetricsWriter(tmp_path, trackers) as steps:
            steps.log(0, {"val/a/acc/mean@1": 0.5})
            with MetricsWriter(tmp_path, trackers, file_name="sft.jsonl") as writer:
                writer.truncate_after(0)
                for step, value in enumerate(values, start=1):
                    writer.log(step, {"sft/loss": value})
    assert read_metrics(tmp_path, "sft.jsonl") == [{"step": 1, "sft/loss": 3.0}]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "sft"))
    events.Reload()
    assert [event.value for event in events.Scalars("sft/loss")] == [3.0]
    steps = EventAccumulator(str(tmp_path / "tensorboard"))
    steps.Reload()
    assert steps.Tags()["scalars"] == ["val/a/acc/mean@1"]
