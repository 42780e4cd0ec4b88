"""Checkpoint directories: what is kept, what damage is seen and named, and what interrupted jobs leave behind."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.run_paths import MARKER
from ctpo_megatron.policy import CheckpointError, checkpoint_files, latest_checkpoint

WRITTEN = (
    '{"step": 1, "score": 0.5, "run": {"step": 1, "weights_version": 2}, '
    '"files": {"common.pt": {"bytes": 1300, "blake2b": "6a8bbf854580e09a94a7d671eb232843"}}, '
    '"settings": {"policy.dtype": "float32"}, "blake2b": "1182bdb8a5352ae94503aa74182509b1"}'
)
"""By commit 45e9584."""


def write(directory: Path, step: int, score: float | None = None, keep_last: int = 2, keep_best: int = 0) -> Path:
    aside = checkpoint_files.begin(directory, step)
    for name in ("a.distcp", "common.pt"):
        (aside / name).write_bytes(f"{name} of {step}".encode() * 100)
    manifest = checkpoint_files.digests(aside, ["a.distcp", "common.pt"])
    marker = checkpoint_files.Marker(step, score, {"step": step}, manifest, settings={})
    return checkpoint_files.publish(aside, marker, keep_last=keep_last, keep_best=keep_best)


def steps(directory: Path) -> list[int]:
    return [checkpoint_files.step_of(path) for path in checkpoint_files.complete(directory)]


def problems(checkpoint: Path) -> list[str]:
    listed = checkpoint_files.read_checkpoint_marker(checkpoint).files
    return checkpoint_files.size_problems(checkpoint, listed) or checkpoint_files.content_problems(
        checkpoint, listed, listed
    )


@pytest.mark.parametrize(
    ("scores", "keep_last", "kept"),
    [
        ([0.1, 0.9, None, 0.5, 0.9, 0.2, 0.3], 2, [1, 4, 5, 6]),
        ([0.5] * 4, 1, [2, 3]),  # the newer of two equals is the better
    ],
)
def test_the_last_and_the_two_best_are_kept(
    tmp_path: Path, scores: list[float | None], keep_last: int, kept: list[int]
) -> None:
    for step, score in enumerate(scores):
        write(tmp_path, step, score, keep_last, keep_best=2)
    assert steps(tmp_path) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:06d}" for step in kept]


def test_a_save_replaces_its_own_step_and_no_later_one(tmp_path: Path) -> None:
    write(tmp_path, 6)
    write(tmp_path, 3, score=0.1, keep_last=1)
    path = write(tmp_path, 3, score=0.2, keep_last=1)
    assert checkpoint_files.read_checkpoint_marker(path).score == 0.2 and steps(tmp_path) == [3, 6]


def test_a_course_that_is_discarded_is_kept_out_of_sight(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step, keep_last=3)
    (tmp_path / "step_000006" / MARKER).unlink()
    renamed = checkpoint_files.discard_checkpoints(tmp_path, after=2)
    assert [path.name for path in renamed] == ["discarded_step_000006", "discarded_step_000004"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000002"
    assert checkpoint_files.discard_checkpoints(tmp_path, after=2) == []
    for step in (3, 4):
        write(tmp_path, step, score=0.5, keep_last=1)
    assert steps(tmp_path) == [4] and problems(renamed[1]) == []
    assert checkpoint_files.read_checkpoint_marker(renamed[1]).score is None


def test_of_each_step_the_last_to_be_discarded_is_kept(tmp_path: Path) -> None:
    for score in (0.1, 0.2):
        write(tmp_path, 4, score)
        (renamed,) = checkpoint_files.discard_checkpoints(tmp_path, after=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["discarded_step_000004"]
    assert checkpoint_files.read_checkpoint_marker(renamed).score == 0.2


def test_an_interruption_of_giving_up_leaves_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step, keep_last=3)
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == "step_000004":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", interrupted)
        checkpoint_files.discard_checkpoints(tmp_path, after=0)
    assert steps(tmp_path) == [2, 4]


def test_what_cannot_be_deleted_is_hidden_and_deleted_by_a_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def still_open(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.shutil, "rmtree", still_open)
        for step in (1, 2, 2, 3):
            write(tmp_path, step, keep_last=1)
    assert steps(tmp_path) == [3] and len(list(tmp_path.glob(".step_*.removing"))) == 3
    assert caplog.text.count("cannot be deleted yet") == 3
    write(tmp_path, 4, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]


def test_an_unfinished_one_is_not_found_and_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    write(tmp_path, 1)
    aside = checkpoint_files.begin(tmp_path, 2)
    (aside / "a.distcp").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint_files.read_checkpoint_marker(aside)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000001"
    again = checkpoint_files.begin(tmp_path, 2)
    assert again != aside and not aside.exists() and list(again.iterdir()) == []


def test_damage_is_named_by_file(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert problems(path) == []
    data = bytearray((path / "a.distcp").read_bytes())
    data[50] ^= 1
    (path / "a.distcp").write_bytes(data)
    assert problems(path) == ["a.distcp does not have the contents that were written"]
    (path / "a.distcp").write_bytes(data[:-3])
    (path / "common.pt").unlink()
    assert problems(path) == [f"a.distcp has {len(data) - 3} bytes instead of {len(data)}", "common.pt is missing"]


def test_a_damaged_marker_is_named_and_the_newest_whole_one_offered(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep_last=3)
    (tmp_path / "step_000002" / "common.pt").unlink()
    for left in ('{"step": 3, "sco', '{"a":' * 100_000):
        (tmp_path / "step_000003" / MARKER).write_text(left)
        with pytest.raises(CheckpointError, match=rf"{MARKER} is damaged.*checkpoint\.load=\S*step_000001$"):
            checkpoint_files.read_checkpoint_marker(tmp_path / "step_000003")
    write(tmp_path, 4, keep_last=4, keep_best=1)  # a damaged one is no reason to stop saving
    assert steps(tmp_path) == [1, 2, 3, 4]


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the marker, and give it the digest of what it holds then."""
    content = json.loads((path / MARKER).read_text())
    del content["blake2b"]
    change(content)
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
    (path / MARKER).write_text(json.dumps({"blake2b": digest} | content))


def test_a_marker_that_was_changed_or_has_no_digest_is_damaged(tmp_path: Path) -> None:
    whole, path = write(tmp_path, 1), write(tmp_path, 2)
    text = (path / MARKER).read_text()
    content = json.loads(text)
    del content["blake2b"]
    for changed in (text.replace('"run": {"step": 2}', '"run": {"step": 7}'), json.dumps(content)):
        assert changed != text
        (path / MARKER).write_text(changed)
        damaged = rf"step_000002/{MARKER} is damaged \(it does not have the contents that were written\).*load={whole}$"
        with pytest.raises(CheckpointError, match=damaged):
            checkpoint_files.read_checkpoint_marker(path)
    (path / MARKER).write_text(text)
    assert checkpoint_files.read_checkpoint_marker(path).run == {"step": 2}


def test_a_marker_as_an_earlier_commit_wrote_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "step_000001"
    path.mkdir()
    (path / MARKER).write_text(WRITTEN)
    marker = checkpoint_files.read_checkpoint_marker(path)
    assert marker.files["common.pt"].bytes == 1300 and marker.settings == {"policy.dtype": "float32"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(files={}), "it lists no files"),
        (lambda content: content.update(files=[1, 2]), ".*no attribute 'items'"),
        (lambda content: content.update(step=None), "it is of step None.*"),
        (lambda content: content.update(surplus=1), ".*'surplus'"),
        (lambda content: content.pop("settings"), ".*'settings'"),
    ],
)
def test_a_marker_of_another_form_is_damaged(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = write(tmp_path, 1)
    rewrite(path, change)
    with pytest.raises(
        CheckpointError, match=rf"{MARKER} is damaged \({message}\)\. No older checkpoint is whole.*run\.overwrite=true"
    ):
        checkpoint_files.read_checkpoint_marker(path)


def test_a_lost_marker_of_the_newest_is_damage(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep_last=3)
    (tmp_path / "step_000002" / MARKER).unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000003"
    (tmp_path / "step_000003" / MARKER).unlink()
    with pytest.raises(CheckpointError, match=rf"3 is damaged: it has lost its {MARKER}.*load=\S*step_000001$"):
        latest_checkpoint(tmp_path)
    (tmp_path / "step_000001" / MARKER).unlink()
    with pytest.raises(CheckpointError, match=r"step_000003 is damaged.*run\.overwrite=true"):
        latest_checkpoint(tmp_path)


def test_a_link_to_nowhere_is_not_a_run_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    directory = tmp_path / "checkpoints"
    directory.symlink_to(tmp_path / "scratch")
    path = write(directory, 1)
    assert latest_checkpoint(directory) == path
    (tmp_path / "scratch").rename(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match=r"checkpoints is a link to \S*scratch, which is not there"):
        latest_checkpoint(directory)


def test_a_renamed_one_is_not_taken_for_that_of_another_step(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    path = (tmp_path / "step_000002").rename(tmp_path / "step_000009")
    with pytest.raises(CheckpointError, match=r"it is of step 2: was its folder renamed.*load=\S*step_000001$"):
        checkpoint_files.read_checkpoint_marker(path)
    assert checkpoint_files.read_checkpoint_marker(path.rename(tmp_path / "the_best")).step == 2
