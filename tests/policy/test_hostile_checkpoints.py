"""Hostile checkpoints run no code: every file of one, on every path that loads it."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.base.run_paths import MARKER
from ctpo_megatron.policy import (
    CheckpointError,
    Layout,
    Trainer,
    checkpoint_files,
)
from tests.policy import megatron_checkpoints as checkpoints
from tests.policy.stepping import has_weights, weights
from tests.policy.test_checkpoint_files import rewrite


class Call:
    """Pickled, it calls `function` when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.build(tmp_path_factory.mktemp("model"))


def unpacked(release: str, place: Path) -> Path:
    with zipfile.ZipFile(checkpoints.FOLDER / f"{release}-plain.zip") as archive:
        archive.extractall(place)
    return place / "step_000002"


def sign(checkpoint: Path) -> None:
    """The marker of the files as they are now: digests have no key."""
    names = [path.name for path in checkpoint.iterdir() if path.name != MARKER]
    files = {name: asdict(entry) for name, entry in checkpoint_files.digests(checkpoint, names).items()}
    rewrite(checkpoint, lambda content: content.update(files=files))


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def in_metadata(checkpoint: Path, hostile: Any) -> None:
    """After all else, so that the description is whole until the last object."""
    path = checkpoint / ".metadata"
    described = pickle.loads(path.read_bytes())
    described.planner_data = hostile
    path.write_bytes(pickle.dumps(described))


def in_common_state(checkpoint: Path, hostile: Any) -> None:
    if (checkpoint / "common.pt").exists():
        content = torch.load(checkpoint / "common.pt", weights_only=True)
        (checkpoint / "common.pt").write_bytes(saved(content | {"more": hostile}))
    else:
        in_shard(checkpoint, "common_state/shard_0_1", saved([{"more": hostile}]))


def in_object(checkpoint: Path, hostile: Any) -> None:
    in_shard(checkpoint, "decoder.layers.mlp.linear_fc1._extra_state/shard_0_1", saved([hostile]))


def in_tensor(checkpoint: Path, hostile: Any) -> None:
    in_shard(checkpoint, "decoder.final_layernorm.weight", saved(hostile))


def in_shard(checkpoint: Path, name: str, content: bytes) -> None:
    """Have the description of a part name these bytes, at the end of a file of shards."""
    described = pickle.loads((checkpoint / ".metadata").read_bytes())
    places = [place for index, place in described.storage_data.items() if index.fqn == name]
    assert places, name
    for place in places:
        file = checkpoint / place.relative_path
        place.offset, place.length = file.stat().st_size, len(content)
        file.write_bytes(file.read_bytes() + content)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(described))


PLACES = [in_metadata, in_common_state, in_object, in_tensor]
WAYS: dict[str, Callable[[Trainer, Path], object]] = {"load": Trainer.load, "load_weights": Trainer.load_weights}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_no_file_of_a_checkpoint_runs(
    layout: Layout,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[Path, Any], None],
    release: str,
    way: str,
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    policy, made = checkpoints.make(layout, model, "plain"), tmp_path / "made"
    before = weights(policy)
    hostile = unpacked(release, tmp_path / "hostile")
    place(hostile, Call(os.mkdir, str(made)))
    sign(hostile)
    with pytest.raises(CheckpointError) as caught:
        WAYS[way](policy, hostile)
    assert not made.exists()
    text = str(caught.value)
    assert str(hostile) in text and "mkdir" in text and "nothing of it was run" in text
    assert "weights_only" not in text and "Traceback" not in text
    if place is in_metadata:  # of the others tensors were read already
        assert has_weights(policy, before)
    WAYS[way](policy, unpacked(release, tmp_path / "good"))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "cannot be loaded"),
        ("[" * 100_000, "RecursionError"),
    ],
    ids=["cut", "list", "deep"],
)
def test_a_format_that_is_none_is_refused(layout: Layout, model: Path, tmp_path: Path, content: str, why: str) -> None:
    hostile = unpacked("0.16.1", tmp_path)
    (hostile / "metadata.json").write_text(content)
    sign(hostile)
    with pytest.raises(CheckpointError, match=why):
        checkpoints.make(layout, model, "plain").load(hostile)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "a\x1b[2J", "a\0"])
def test_a_manifest_names_files_of_its_folder_alone(tmp_path: Path, name: str) -> None:
    hostile = unpacked("0.16.1", tmp_path)
    rewrite(hostile, lambda content: content["files"].update({name: {"bytes": 1, "blake2b": "0"}}))
    with pytest.raises(CheckpointError, match="which is no name of a file of it"):
        checkpoint_files.read_checkpoint_marker(hostile)


HOSTILE: dict[str, bytes] = {
    "os.system": pickle.dumps(Call(os.system, "true")),
    "protocol 2": pickle.dumps(Call(eval, "1"), protocol=2),
    "a class of an allowed module": pickle.dumps(Call(torch.distributed.checkpoint.planner.SavePlanner)),
    "attributes of a class": b"\x80\x04" + b"ctorch\nSize.__class__\n.",
    "a new class": b"\x80\x04" + b"ctorch.distributed.checkpoint.metadata\nEnum\n.",
    "a persistent id": b"\x80\x04" + b"Px\n.",
    "text": b"no pickle at all",
    "another object": pickle.dumps({"state_dict_metadata": {}}),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_description_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^x/\.metadata is no description of a checkpoint: .* Take another"):
        checkpoint_files.metadata_from(content, Path("x/.metadata"))


@pytest.mark.parametrize("path", ["../other.distcp", "/etc/passwd", "a/b"])
def test_a_description_names_files_of_its_folder_alone(tmp_path: Path, path: str) -> None:
    content = (unpacked("0.16.1", tmp_path) / ".metadata").read_bytes()
    described = pickle.loads(content)
    next(iter(described.storage_data.values())).relative_path = path
    with pytest.raises(CheckpointError, match=f"it names a file elsewhere, '{path}'"):
        checkpoint_files.metadata_from(pickle.dumps(described), tmp_path)
