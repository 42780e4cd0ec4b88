"""safetensors files written tensor by tensor, read by the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ctpo_megatron.base.tensor_file import TensorFile
from ctpo_megatron.engines.weights import file as weights

TENSORS = {
    "matrix": torch.arange(12.0).view(3, 4).T,
    "scalar": torch.tensor(3.5),
    "half": torch.linspace(-1, 1, 7).bfloat16(),
    "empty": torch.zeros(0, 4),
    "ids": torch.arange(5),
    'with "quotes" and ü': torch.ones(2, dtype=torch.bool),
}


def check(path: Path) -> None:
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("moved_before", [0, 3, 6, None])
def test_the_library_reads_what_was_written_and_moved_meanwhile(tmp_path: Path, moved_before: int | None) -> None:
    file = TensorFile(tmp_path / "a")
    for index, (name, tensor) in enumerate([*TENSORS.items(), (None, None)]):
        if index == moved_before:
            file.move(tmp_path / "b")
        if name is not None:
            file.add(name, tensor)
    file.close()
    assert (tmp_path / "a").exists() == (moved_before is None)
    check(tmp_path / ("a" if moved_before is None else "b"))
    assert file.tensor_bytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_a_full_header_is_said_before_anything_is_written(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "a", header_bytes=1024)
    count = 0
    while file.has_room_for(f"tensor {count}"):
        file.add(f"tensor {count}", torch.full((2,), count))
        count += 1
    with pytest.raises(ValueError, match="start another file"):
        file.add("one more", torch.zeros(2))
    file.close()
    assert {int(value[0]) for value in load_file(tmp_path / "a").values()} == set(range(count)) and count > 3


def test_weights_leave_shared_memory_when_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared, disk = tmp_path / "shared", tmp_path / "disk"
    shared.mkdir()
    disk.mkdir()
    monkeypatch.setattr(weights, "_SHARED_MEMORY", shared)
    monkeypatch.setattr(weights, "_disk", lambda: disk)
    monkeypatch.setattr(weights, "_has_space", lambda directory, size: size < 40)
    snapshot = weights.WeightSnapshot(TENSORS.items(), 4)
    path = Path(snapshot.publish())
    assert path.parent == disk and list(shared.iterdir()) == []
    assert f"no space in {shared}" in caplog.text and f"go by {disk}" in caplog.text
    check(path)
    snapshot.close()
    assert list(disk.iterdir()) == []


def test_nothing_is_left_when_the_weights_stop_coming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SHARED_MEMORY", tmp_path)

    def failing():
        yield "a", torch.zeros(3)
        raise RuntimeError("the peer died")

    with pytest.raises(RuntimeError, match="peer"):
        weights.WeightSnapshot(failing(), 1)
    assert list(tmp_path.iterdir()) == []
