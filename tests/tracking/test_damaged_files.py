"""Files of a run that a machine without power, or a hand, has damaged: a note is done without, the rest is named."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path

import pytest

from ctpo_megatron.base import files
from ctpo_megatron.base.files import DamagedFileError, aside, write_json
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.cli import main
from ctpo_megatron.config import ConfigError
from ctpo_megatron.evaluate.store import SampleStore
from ctpo_megatron.report.trajectories.selection import sample_of_run
from ctpo_megatron.run import is_finished, open_run_directory, record_finish, take_over
from ctpo_megatron.tracking import (
    MetricsWriter,
    Phases,
    open_trackers,
    read_heartbeat,
    read_metrics,
    read_trajectories,
)

LEFT = {"nothing": b"", "unwritten": b"\0" * 40, "cut": b'{"a": ', "other": b"[3]\n", "no text": b"\xff\xfe"}
damaged = pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)


@damaged
def test_a_resume_does_without_notes(config_in, caplog, left):
    directory = open_run_directory(config_in())
    with Phases(directory).stage("rl"):
        pass
    record_finish(directory, config_in().run.steps)
    notes = [directory / name for name in ("environment.json", "stages.json", "heartbeat.json")]
    for note in notes:
        note.write_bytes(left)
    auto = config_in(run={"resume": "auto"})
    assert not is_finished(auto.run)
    assert Phases(directory).stages == {} and read_heartbeat(directory) is None
    open_run_directory(auto)
    for note in notes:
        assert f"{note} is damaged" in caplog.text
    (directory / "environment.json").write_bytes(left)
    record_finish(directory, auto.run.steps)
    assert is_finished(auto.run)
    open_run_directory(auto)  # not taken for a run of a version that did not write its own


@damaged
def test_a_resume_says_that_it_cannot_compare_configurations(config_in, caplog, left):
    directory = open_run_directory(config_in())
    whole = (directory / "config.yaml").read_text()
    (directory / "config.yaml").write_bytes(left)
    open_run_directory(config_in(run={"resume": True}))
    take_over(config_in(run={"resume": True}))
    assert "which values differ from the run's is unknown" in caplog.text
    assert (directory / "config.yaml").read_text() == whole
    assert not (directory / "config.previous.yaml").exists()


@damaged
def test_what_cannot_be_done_without_is_named(config_in, tmp_path, capsys, left):
    directory = open_run_directory(config_in())
    (directory / "config.yaml").write_bytes(left)
    assert main(["report", str(directory)]) == 2
    assert f"ctpo: {directory / 'config.yaml'} is damaged" in capsys.readouterr().err
    metrics = directory / "metrics.jsonl"
    metrics.write_bytes(b'{"step": 1}\n' + left + b'\n{"step": 2}\n')
    with pytest.raises(DamagedFileError, match=r"metrics\.jsonl, line 2, is damaged \(no"):
        read_metrics(directory)


@damaged
def test_the_report_leaves_out_a_damaged_dump(tmp_path, caplog, left):
    dump = tmp_path / "trajectories" / "step_000003.parquet"
    dump.parent.mkdir()
    dump.write_bytes(left + b"\n")
    with pytest.raises(DamagedFileError, match=r"step_000003"):
        read_trajectories(dump)
    sample = sample_of_run(tmp_path)
    assert sample.views == [] and "step 3, whose file is damaged" in sample.left_out
    assert f"{dump}" in caplog.text and "the report goes without it" in caplog.text


@damaged
def test_samples_of_unknown_settings_are_not_mixed(tmp_path, left):
    SampleStore(tmp_path, {"model": "a"}).close()
    (tmp_path / "evaluation.json").write_bytes(left)
    with pytest.raises(ConfigError, match=r"its evaluation\.json is damaged"):
        SampleStore(tmp_path, {"model": "a"})
    (tmp_path / "evaluation.json").unlink()
    (tmp_path / "samples.jsonl").write_bytes(left + b"\n")
    with pytest.raises(DamagedFileError, match=r"samples\.jsonl, line 1, is damaged \(.*give another --output"):
        SampleStore(tmp_path, {"model": "a"})


@damaged
def test_a_tracker_whose_identity_is_lost_begins_anew(config_in, tmp_path, caplog, left):
    name = "misbehaving_trackers:Recorder"
    folders = {"path": [str(Path(__file__).parent)]}
    config = config_in(tracking={"trackers": [name]}, extensions=folders)

    def known() -> str:
        open_trackers(config, tmp_path).close()
        made = (tmp_path / "recorded_Recorder.txt").read_text().splitlines()[-2]
        return made.removeprefix("made demo ").removesuffix(" {}")

    assert [known(), known()] == ["None", "first"]
    RunPaths(tmp_path).tracker(name).write_bytes(left)
    assert [known(), known()] == ["None", "first"]
    assert f"{name} begins a run of its own" in caplog.text


def test_nothing_stays_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    path = write_json(tmp_path / "note.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(OSError, match="disk full"), aside(path, durable=True) as written:
        written.write_text("half")
        raise OSError("disk full")
    assert [file.name for file in tmp_path.iterdir()] == ["note.json"]
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_full_disk_names_the_file_that_it_did_not_take(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '.*note\.json'"), aside(tmp_path / "note.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(files, "FULL_S", 0.0)
    with MetricsWriter(tmp_path) as writer:
        for buffered, fails in (("", lambda: writer.log(1, {"a": 1.0})), ("some", writer.close)):
            writer._file.close()
            writer._file = Path("/dev/full").open("a")  # noqa: SIM115 - the writer closes it
            writer._file.write(buffered)
            with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
                fails()


def test_the_history_of_a_run_is_on_the_disk_before_it_is_replaced(tmp_path, monkeypatch):
    """A resume rewrites metrics.jsonl: without that a loss of power could leave an empty one."""
    synced = []
    monkeypatch.setattr("ctpo_megatron.base.files.os.fsync", lambda descriptor: synced.append(descriptor))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with MetricsWriter(tmp_path):
        assert len(synced) == 1


@pytest.fixture(autouse=True)
def warnings(caplog):
    caplog.set_level(logging.WARNING)
