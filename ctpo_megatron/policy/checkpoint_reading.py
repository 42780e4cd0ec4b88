"""Reads the files of a checkpoint as data: nothing outside an allow-list is made or called.

torch and megatron-core unpickle `.metadata`, and objects among the shards, without a limit. `replacements.py` puts
these functions in their place.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException, maybe_load_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.api import CheckpointException as DistributedReadError
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.serialization import _get_layout

from ctpo_megatron.policy.checkpoint_files import CheckpointError

_CLASSES: tuple[type, ...] = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    SavePlan,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
)
"""What `.metadata` of megatron-core 0.16.1 and 0.19.2 is made of."""

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{(made.__module__, made.__qualname__): made for made in _CLASSES},
    ("torch.serialization", "_get_layout"): _get_layout,
    **{("torch", name.removeprefix("torch.")): value for name, value in _DTYPES.items()},
}
"""Everything that a pickle may name: classes of torch that hold data, and its dtypes and layouts."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!r}") from None


def _kind(value: Any) -> str:
    """What a value is, without its content, which may have no end when it is printed."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else type(value).__name__


def _is_index(key: Any) -> bool:
    if type(key) is not MetadataIndex or type(key.fqn) is not str:
        return False
    return type(key.index) in (int, NoneType) and type(key.offset) in (torch.Size, NoneType)


def metadata_from(content: bytes, path: Path) -> Metadata:
    """What `.metadata` at `path` says. Raises CheckpointError for what checkpoints of this trainer do not contain."""
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        _check(found)
    except Exception as error:  # a hostile file can raise anything
        why = " ".join((str(error) or repr(error)).split())
        raise CheckpointError(
            f"{path} is no description of a checkpoint: {why:.300}. It was read as data, and nothing of it was run or "
            "loaded. Take another checkpoint, and none from people whom you do not trust"
        ) from error
    return cast(Metadata, found)


def _check(found: Any) -> None:
    """Raises ValueError or AttributeError where the description has another form than torch writes."""
    if type(found) is not Metadata:
        raise ValueError(f"it holds {_kind(found)}")
    for name, part in found.state_dict_metadata.items():
        if type(name) is not str or not _is_part(part):
            raise ValueError(f"it describes a part by {_kind(part)}")
    for index, place in found.storage_data.items():
        if not _is_index(index) or type(place) is not _StorageInfo or type(place.relative_path) is not str:
            raise ValueError(f"it names {_kind(place)} as a place")
        if os.path.basename(place.relative_path) != place.relative_path:
            raise ValueError(f"it names a file elsewhere, {place.relative_path!r:.200}")


def _is_part(part: Any) -> bool:
    """A tensor with sizes of its chunks, or an object."""
    if type(part) is not TensorStorageMetadata:
        return type(part) is BytesStorageMetadata
    sizes = [part.size, *(size for chunk in part.chunks for size in (chunk.offsets, chunk.sizes))]
    return type(part.properties) is TensorProperties and all(type(size) is torch.Size for size in sizes)


def read_metadata(self: FileSystemReader, *_arguments: Any, **options: Any) -> Metadata:
    """Read `.metadata` (shadows FileSystemReader's method). Raises CheckpointError, OSError."""
    path = Path(self._get_metadata_path(options.get("rank")))
    metadata = metadata_from(path.read_bytes(), path)
    if type(metadata.storage_meta) is not StorageMeta:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


def load_bytes(self: Any, read_item: Any, value: IO[bytes]) -> None:
    """Restore an object among the shards (shadows DefaultLoadPlanner's method, which would run what it says)."""
    from torch.distributed.checkpoint._nested_dict import set_element

    content = torch.load(value, weights_only=True)
    name = read_item.dest_index.fqn
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], content)
    else:
        self.state_dict[name] = content


def load_common(*arguments: Any) -> Any:
    """Read `common.pt` (shadows a method of 0.16, with the folder as its last argument, and a function of 0.19).

    The originals leave it to the environment (TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD) whether it may run code.
    """
    path = Path(arguments[-1], COMMON_STATE_FNAME)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointingException(f"{path} does not exist") from error


def read_description(checkpoint: Path) -> dict[str, ShardedTensor | ShardedObject]:
    """The tensors and objects that `metadata.json` and `.metadata` describe. Raises CheckpointError."""
    try:
        form = maybe_load_config(str(checkpoint))
        # megatron-core 0.19 reads any as what it writes itself.
        if form and (form.sharded_backend, form.sharded_backend_version) != ("torch_dist", 1):
            said = f"{form.sharded_backend} {form.sharded_backend_version}"
            raise CheckpointError(
                f"{checkpoint} cannot be loaded: metadata.json names the format {said:.99}, and torch_dist 1 is read"
            )
        described: dict[str, ShardedTensor | ShardedObject] = load_sharded_metadata(str(checkpoint))
    except CheckpointError:
        raise
    except Exception as error:  # no collective, and no code but megatron's reader: the files are to blame
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{checkpoint} cannot be loaded, its description is damaged: {why:.300}") from error
    return described


@contextmanager
def refused_as_one(checkpoint: Path) -> Iterator[None]:
    """Raises CheckpointError where megatron-core or torch refuse a file of `checkpoint`."""
    try:
        yield
    except DistributedReadError as error:
        # The exception's text is the tracebacks of all ranks.
        reasons = dict.fromkeys(_short(str(found[0])) for found in error.failures.values())
        raise CheckpointError(f"{checkpoint} cannot be loaded: {'; '.join(reasons)}") from error
    except (CheckpointingException, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{checkpoint} cannot be loaded: {_short(str(error))}") from error


def _short(reason: str) -> str:
    """Without torch's advice to load a file that it refused all the same."""
    if "weights_only" not in reason:
        return reason
    found = re.search(r"(?:GLOBAL|class|function|operand|instruction)[^\n]*", reason.partition("\n")[2])
    asked = f" ({found[0].rstrip('.')})" if found else ""
    return f"a file holds more than tensors and plain values{asked}, and nothing of it was run"
