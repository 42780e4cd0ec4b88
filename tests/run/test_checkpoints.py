"""From which checkpoint a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron import __version__
from ctpo_megatron.config import Config
from ctpo_megatron.policy import CheckpointError, CheckpointWriteError, checkpoint_files
from ctpo_megatron.run import Checkpoints
from tests.tracking.synthetic_run import make_config


def write(directory: Path, step: int, **state: Any) -> Path:
    aside = checkpoint_files.begin(directory, step)
    (aside / "common.pt").write_bytes(b"all")
    files = checkpoint_files.digests(aside, ["common.pt"])
    marker = checkpoint_files.Marker(step, None, {"step": step, **state}, files, settings={})
    return checkpoint_files.publish(aside, marker, keep_last=9, keep_best=0)


class Nothing:
    """Stands for what is not used here: rollouts, and a reporter that writes nothing."""

    def begin_sft(self, done: int) -> None:
        """Nothing to set aside."""

    def note(self, text: str) -> None:
        """Nothing is shown."""


def checkpoints_of(config: Config, trainer: Any = None) -> Checkpoints:
    nothing: Any = Nothing()
    return Checkpoints(config, trainer, config.run.directory, nothing, nothing)


def test_the_newest_of_rl_comes_before_those_of_sft_and_another_run(tmp_path: Path) -> None:
    other = write(tmp_path / "other" / "checkpoints", 5)

    def found(resume: bool | str, load: Path | None = None) -> Path | None:
        checkpoint = {"load": None if load is None else str(load)}
        config = make_config(tmp_path, run={"resume": resume}, checkpoint=checkpoint)
        return checkpoints_of(config).find()

    ours = tmp_path / "demo" / "checkpoints"
    assert found(True) is found("auto") is None
    assert found("auto", other) == found(True, other) == found(False, other) == other
    sft = write(ours / "sft", 40)
    assert found("auto") == found(True) == found("auto", other) == sft
    first, second = write(ours, 1), write(ours, 2)
    assert found(True) == found("auto") == found("auto", other) == second
    assert found(False) is None and found(True, other) == other
    assert found(True, first) == found("auto", first) == first


def test_sft_goes_before_rl_and_from_its_own_checkpoints(tmp_path: Path) -> None:
    sft: dict[str, Any] = {"data": ["sft.parquet"], "steps": 9}
    with_sft, without = make_config(tmp_path, sft=sft), make_config(tmp_path)
    checkpoints = tmp_path / "demo" / "checkpoints"
    of_sft, of_rl = write(checkpoints / "sft", 3), write(checkpoints, 3, rollouts={})
    assert checkpoints_of(with_sft).sft_to_do(None) == with_sft.sft
    assert checkpoints_of(with_sft).sft_to_do(of_sft) == with_sft.sft
    assert checkpoints_of(with_sft).sft_to_do(of_rl) is None
    assert checkpoints_of(without).sft_to_do(None) is checkpoints_of(without).sft_to_do(of_rl) is None
    with pytest.raises(CheckpointError, match=r"sft/step_000003 is of the SFT stage, which"):
        checkpoints_of(without).sft_to_do(of_sft)


class Exporting:
    """Of a trainer what the end of SFT needs."""

    def export(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")


def test_a_finished_sft_is_not_done_again(tmp_path: Path) -> None:
    config = make_config(tmp_path, run={"resume": True}, sft={"data": ["sft.parquet"], "steps": 9})
    run, of_sft = tmp_path / "demo", write(tmp_path / "demo" / "checkpoints" / "sft", 9)
    assert checkpoints_of(config).find() == of_sft and checkpoints_of(config).start_weights(None) is None
    ours = checkpoints_of(config, Exporting())
    ours.finish_sft()
    assert ours.find() is None and ours.sft_to_do(None) is None
    assert ours.start_weights(None) == run / "sft_model"
    assert ours.sft_to_do(write(tmp_path / "saved", 9)) == config.sft  # checkpoint.load names it
    assert ours.start_weights(write(run / "checkpoints", 1, rollouts={})) is None  # that has later weights


def test_a_checkpoint_is_of_the_stage_that_wrote_it_wherever_it_lies(tmp_path: Path) -> None:
    config = make_config(tmp_path, sft={"data": ["sft.parquet"], "steps": 9})
    assert checkpoints_of(config).sft_to_do(write(tmp_path / "saved" / "sft", 3, rollouts={})) is None
    assert checkpoints_of(config).sft_to_do(write(tmp_path / "saved", 3)) == config.sft


class Saved:
    """Of a trainer what the place in the batches needs: what its checkpoint says of the run."""

    def __init__(self, **state: Any) -> None:
        self._state = state

    def load(self, directory: Path, steps: int) -> dict[str, Any]:
        self.steps = steps
        return self._state


def test_sft_goes_on_with_the_batches_it_was_begun_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(tmp_path, sft={"data": ["sft.parquet"], "steps": 9})
    config.run.directory.mkdir()
    checkpoint = tmp_path / "step_000003"
    ours = {"seed": 0, "conversations_per_step": 8, "conversations": "aa"}

    def restored(**saved: Any) -> int:
        trainer = Saved(step=3, **saved)
        try:
            return checkpoints_of(config, trainer).restore_sft(9, checkpoint, ours)
        finally:
            assert trainer.steps == 9  # of the schedule

    assert restored(order=dict(ours)) == 3 and not caplog.records
    with pytest.raises(CheckpointError) as refused:
        restored(order={"seed": 0, "conversations_per_step": 4, "conversations": "bb"})
    assert "other batches: conversations_per_step, conversations changed since" in str(refused.value)


def test_a_checkpoint_without_what_this_version_needs_is_of_another_one(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = tmp_path / "theirs"
    run.mkdir()

    def refused(checkpoint: Path) -> str:
        ours = checkpoints_of(config, Saved(step=3))
        with pytest.raises(CheckpointError) as of_rl:
            ours.restore(checkpoint)
        with pytest.raises(CheckpointError) as of_sft:
            ours.restore_sft(9, checkpoint, {})
        assert str(of_rl.value) == str(of_sft.value)
        return str(of_rl.value)

    (run / "environment.json").write_text('{"version": "0.9.1"}')
    for folder in ("checkpoints", "checkpoints/sft"):
        path = run / folder / "step_000003"
        message = f"{path} was written by another version of ctpo-megatron (0.9.1), and version {__version__}"
        assert message in refused(path)
    assert "new one (run.name=other), with the run's export as model.path" in refused(path)


class Disk:
    """A trainer whose saves of SFT fail with these, one after another, and then succeed."""

    def __init__(self, *failures: CheckpointWriteError) -> None:
        self._failures, self.saves = list(failures), 0

    def save(self, *_: object, **__: object) -> CheckpointWriteError | None:
        self.saves += 1
        return self._failures.pop(0) if self._failures else None


def failure(**traits: bool) -> CheckpointWriteError:
    failed = CheckpointWriteError("a checkpoint could not be written")
    vars(failed).update(traits)
    return failed


def test_a_save_is_tried_until_the_disk_has_room_and_once_more_where_a_process_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ctpo_megatron.run.checkpoints.FULL_PAUSE_S", 0.01)

    def saves(*failures: CheckpointWriteError) -> int:
        disk = Disk(*failures)
        checkpoints_of(make_config(tmp_path), disk).save_sft(1, {})
        return disk.saves

    assert saves() == 1
    assert saves(*(failure(full=True) for _ in range(5))) == 6
    assert [record.getMessage() for record in caplog.records] == [
        "a checkpoint could not be written. It is tried again for 300 s"
    ]
    assert saves(failure()) == 2
    for last in ((failure(), failure()), (failure(late=True),)):
        with pytest.raises(CheckpointWriteError):
            saves(*last)
    monkeypatch.setattr("ctpo_megatron.run.checkpoints.FULL_S", 0.0)
    with pytest.raises(CheckpointWriteError):
        saves(*(failure(full=True) for _ in range(5)))
