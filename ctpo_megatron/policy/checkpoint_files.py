"""Checkpoint directories on disk: written aside, published with a manifest, verified, pruned, found, read as data.

torch unpickles `.metadata` without a limit: `replacements.py` has it make and call nothing outside an allow-list.
Everything else is loaded as torch's data (`loaded_as_data`).
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException as DistributedReadError
from torch.serialization import _get_layout

from ctpo_megatron.base.files import sync
from ctpo_megatron.base.run_paths import MARKER, discarded, step_in, step_name

log = logging.getLogger(__name__)

_DATA, _ANYTHING = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""Variables by which torch restricts all loads to data, or none."""
_DIGEST = "blake2b"
"""Key of the digest of the rest of the marker."""


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message names the file or tensor, the problem and what to do."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written; another attempt may succeed.

    full: the disk, or a quota, has no room. late: the writers are not done, and nothing else can be written meanwhile.
    """

    full = late = False


@dataclass(frozen=True)
class FileEntry:
    """Size of a file, and its 128-bit digest in hexadecimal."""

    bytes: int
    blake2b: str


@dataclass(frozen=True)
class Marker:
    """Content of `COMPLETE.json`: the step, its score (None: unknown), the driver's state, and every file.

    settings: keys of the configuration that decide which tensors there are, with their values.
    """

    step: int
    score: float | None
    run: dict[str, Any]
    files: dict[str, FileEntry]
    settings: dict[str, Any]


def begin(directory: Path, step: int) -> Path:
    """Return an empty folder to write into; remains of interrupted saves and deletions are removed first.

    The name is unique: a process that survived its killed job may still be writing into an older folder.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for remains in directory.glob(".step_*"):
        shutil.rmtree(remains, ignore_errors=True)
    aside = _aside(directory, step, "writing")
    aside.mkdir()
    return aside


def digests(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Size and blake2b-128 digest of files, which are read in pieces."""
    found: dict[str, FileEntry] = {}
    for name in names:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            found[name] = FileEntry(file.tell(), digest.hexdigest())
    return found


def publish(aside: Path, marker: Marker, *, keep_last: int, keep_best: int) -> Path:
    """Write the marker, rename the folder to `step_%06d`, and delete older checkpoints that need not be kept."""
    directory = aside.parent
    content = asdict(marker)
    with (aside / MARKER).open("w", encoding="utf-8") as file:
        json.dump(content | {_DIGEST: _digest(content)}, file)
        file.flush()
        os.fsync(file.fileno())
    sync(aside)
    final = directory / step_name(marker.step)
    former = _hide(final) if final.exists() else None
    aside.rename(final)
    sync(directory)
    if former is not None:
        _delete(former)
    for old in _superfluous(complete(directory), marker.step, keep_last, keep_best):
        try:
            _delete(_hide(old))
        except OSError as error:
            log.warning("%s is no longer needed and cannot be hidden: %s", old, error)
    return final


def discard_checkpoints(directory: Path, after: int) -> list[Path]:
    """Rename the checkpoints of steps beyond `after` to `discarded_step_%06d`, where no search finds them; the new
    paths.

    An earlier discarded checkpoint of the same step is deleted. The newest is renamed first, so that an interruption
    leaves a shorter run, not one with a gap.
    """
    found = [path for path in reversed(_all_named(directory)) if step_of(path) > after]
    renamed = []
    for path in found:
        target = discarded(path)
        former = _hide(target) if target.exists() else None
        path.rename(target)
        if former is not None:
            _delete(former)
        renamed.append(target)
    if renamed:
        sync(directory)
    return renamed


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    return [path for path in _all_named(directory) if (path / MARKER).is_file()]


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest checkpoint in `directory`; None when there is none.

    Raises CheckpointError when it has no marker, since the marker is written before the name.
    """
    found = _all_named(directory)
    if found and not (found[-1] / MARKER).is_file():
        raise CheckpointError(f"{found[-1]} is damaged: it has lost its {MARKER}{advice(found[-1])}")
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(checkpoint.name.rpartition("_")[2])


def read_checkpoint_marker(checkpoint: Path) -> Marker:
    """Return the marker of a checkpoint; raises CheckpointError when it is missing or damaged."""
    try:
        content = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        if content.pop(_DIGEST, None) != _digest(content):
            raise ValueError("it does not have the contents that were written")
        marker = Marker(**content | {"files": {name: FileEntry(**file) for name, file in content["files"].items()}})
        if not marker.files:
            raise ValueError("it lists no files")
        if elsewhere := [name for name in marker.files if os.path.basename(name) != name or not name.isprintable()]:
            raise ValueError(f"it lists {elsewhere[0]!r:.200}, which is no name of a file of it")
        if _named(checkpoint) and step_of(checkpoint) != marker.step:
            raise ValueError(f"it is of step {marker.step}: was its folder renamed, or copied from elsewhere?")
    except FileNotFoundError as error:
        raise CheckpointError(f"{checkpoint} is no complete checkpoint: it has no {MARKER}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint / MARKER} is damaged ({error}){advice(checkpoint)}") from error
    return marker


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def size_problems(checkpoint: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """Files that are missing or differ in size from the manifest; reads no contents."""
    problems = []
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != expected.bytes:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {expected.bytes}")
    return problems


def content_problems(checkpoint: Path, files: Mapping[str, FileEntry], names: Iterable[str]) -> list[str]:
    """Which of `names` differ from what was written; reads them completely."""
    found = digests(checkpoint, names)
    return [f"{name} does not have the contents that were written" for name in found if found[name] != files[name]]


def advice(checkpoint: Path) -> str:
    """Return how to continue without a broken checkpoint: the newest older one whose files all exist, if any."""
    older = (
        [path for path in complete(checkpoint.parent) if step_of(path) < step_of(checkpoint)]
        if _named(checkpoint)
        else []
    )
    for path in reversed(older):
        try:
            whole = not size_problems(path, read_checkpoint_marker(path).files)
        except CheckpointError:
            whole = False
        if whole:
            return f". The newest older checkpoint is whole: continue from it with checkpoint.load={path}"
    return ". No older checkpoint is whole: restore the files from a copy, or start again with run.overwrite=true"


def _all_named(directory: Path) -> list[Path]:
    """Every `step_*` in `directory`, damaged or not, oldest first.

    Raises CheckpointError for a dangling link: without it a run would start from the beginning.
    """
    if directory.is_symlink() and not directory.exists():
        place = directory.readlink()
        raise CheckpointError(f"{directory} is a link to {place}, which is not there: is its file system mounted?")
    return sorted(filter(_named, directory.iterdir()), key=step_of) if directory.is_dir() else []


def _named(path: Path) -> bool:
    return step_in(path.name) is not None


def _superfluous(found: Sequence[Path], newest: int, keep_last: int, keep_best: int) -> list[Path]:
    present = [path for path in found if step_of(path) <= newest]
    scores = {path: score for path in present if keep_best and (score := _score(path)) is not None}
    best = sorted(scores, key=lambda path: (scores[path], step_of(path)), reverse=True)[:keep_best]
    kept = {*present[-keep_last:], *best}
    return [path for path in present if path not in kept]


def _score(checkpoint: Path) -> float | None:
    try:
        return read_checkpoint_marker(checkpoint).score
    except CheckpointError:
        return None


def _hide(checkpoint: Path) -> Path:
    """Rename before deletion: an interrupted deletion must not leave half a checkpoint under a valid name."""
    aside = _aside(checkpoint.parent, step_of(checkpoint), "removing")
    checkpoint.rename(aside)
    return aside


def _delete(hidden: Path) -> None:
    """A failure costs space, not the run: the next `begin` tries again."""
    try:
        shutil.rmtree(hidden)
    except OSError as error:
        log.warning("%s is no longer needed and cannot be deleted yet: %s", hidden, error)


def _aside(directory: Path, step: int, purpose: str) -> Path:
    return directory / f".{step_name(step)}.{secrets.token_hex(4)}.{purpose}"


_MODULES = {module.__name__: vars(module) for module in (torch, torch.serialization, filesystem, metadata, planner)}
"""Whose records `.metadata` of megatron-core 0.16.1 and 0.19.2 is made of."""


class _Unpickler(pickle.Unpickler):
    """Makes records of `_MODULES`: data classes, enumerations, sizes, and torch's dtypes and layouts."""

    def find_class(self, module: str, name: str) -> Any:
        found = _MODULES.get(module, {}).get(name)
        is_data = is_dataclass(found) or isinstance(found, EnumType | torch.dtype) or found in (torch.Size, _get_layout)
        if is_data and found is not Enum:
            return found
        raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!r}")


def metadata_from(content: bytes, path: Path) -> metadata.Metadata:
    """Return what `.metadata` at `path` says. Raises CheckpointError for what checkpoints of this trainer do not
    contain.
    """
    try:
        found: metadata.Metadata = _Unpickler(io.BytesIO(content)).load()
        for place in found.storage_data.values():
            if os.path.basename(place.relative_path) != place.relative_path:
                raise ValueError(f"it names a file elsewhere, {place.relative_path!r:.200}")
    except Exception as error:  # a hostile file can raise anything
        why = " ".join((str(error) or repr(error)).split())
        raise CheckpointError(
            f"{path} is no description of a checkpoint: {why:.300}. It was read as data, and nothing of it was run or "
            "loaded. Take another checkpoint, and none from people whom you do not trust"
        ) from error
    return found


def read_metadata(self: filesystem.FileSystemReader, *_arguments: Any, **options: Any) -> metadata.Metadata:
    """Read `.metadata` (shadows FileSystemReader's method). Raises CheckpointError, OSError."""
    path = Path(self._get_metadata_path(options.get("rank")))
    described = metadata_from(path.read_bytes(), path)
    described.storage_meta = described.storage_meta or metadata.StorageMeta()
    described.storage_meta.load_id = self.load_id
    return described


def read_description(checkpoint: Path) -> dict[str, ShardedTensor | ShardedObject]:
    """Return the tensors and objects that `metadata.json` and `.metadata` describe. Raises CheckpointError."""
    try:
        described: dict[str, ShardedTensor | ShardedObject] = load_sharded_metadata(str(checkpoint))
    except CheckpointError:
        raise
    except Exception as error:  # no collective, and no code but megatron's reader: the files are to blame
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{checkpoint} cannot be loaded, its description is damaged: {why:.300}") from error
    return described


@contextmanager
def loaded_as_data(checkpoint: Path) -> Iterator[None]:
    """Within, torch loads tensors and plain values only, whatever its callers and the environment ask for.

    Raises CheckpointError where megatron-core or torch refuse a file of `checkpoint`.
    """
    asked = {name: os.environ.pop(name) for name in (_ANYTHING, _DATA) if name in os.environ}
    os.environ[_DATA] = "1"
    try:
        yield
    except DistributedReadError as error:
        # The exception's text is the tracebacks of all ranks.
        reasons = dict.fromkeys(_short(str(found[0])) for found in error.failures.values())
        raise CheckpointError(f"{checkpoint} cannot be loaded: {'; '.join(reasons)}") from error
    except (CheckpointingException, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{checkpoint} cannot be loaded: {_short(str(error))}") from error
    finally:
        del os.environ[_DATA]
        os.environ |= asked


def _short(reason: str) -> str:
    """Without torch's advice to load a file that it refused all the same."""
    if "weights_only" not in reason:
        return reason
    found = re.search(r"(?:GLOBAL|class|function|operand|instruction)[^\n]*", reason.partition("\n")[2])
    asked = f" ({found[0].rstrip('.')})" if found else ""
    return f"a file holds more than tensors and plain values{asked}, and nothing of it was run"
