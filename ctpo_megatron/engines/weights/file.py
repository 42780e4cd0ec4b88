"""The trainer's end of a weight update: one safetensors file in shared memory, of which only the path travels."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ctpo_megatron.engines.weights.checksums import Sums

log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_HEADER_BYTES = 16 << 20  # names of some 70,000 tensors: a mixture of experts has one for each matrix


def _has_space(directory: Path, size: int) -> bool:
    """Whether `size` bytes can be written there with room to spare."""
    return os.access(directory, os.W_OK) and shutil.disk_usage(directory).free > size + (16 << 20)


class WeightSnapshot:
    """The weights of one version, kept so that an engine that starts later can be given them again.

    Tensors are written as they come; in the process one of them exists at a time. They go to shared memory, and to the
    temporary directory once that is full. The file has a name only while `published()`; between updates it lives on as
    an open descriptor, so nothing is left behind in shared memory however the process ends, except in the middle of an
    update.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        from ctpo_megatron.base.tensor_file import TensorFile

        self.version = version
        writer = TensorFile(_new_path(_SHARED_MEMORY if _has_space(_SHARED_MEMORY, 0) else _disk()), _HEADER_BYTES)
        try:
            for name, tensor in named_tensors:
                if writer.path.parent == _SHARED_MEMORY and not _has_space(_SHARED_MEMORY, tensor.nbytes):
                    writer.move(_new_path(_disk()))
                writer.add(name, tensor)
                del tensor  # or it would stay while the next one is gathered
            writer.close()
        except BaseException:
            writer.discard()
            raise
        if writer.path.parent != _SHARED_MEMORY:
            log.warning(
                "no space in %s (docker run --shm-size): weights of version %d go by %s, which is slower",
                _SHARED_MEMORY,
                version,
                writer.path.parent,
            )
        self.names, self.size, self._path = writer.names, writer.tensor_bytes, writer.path
        self._file: IO[bytes] = open(self._path, "rb")  # noqa: SIM115 - held for the life of the snapshot

    @contextmanager
    def published(self) -> Iterator[str]:
        """Path of the file, valid inside the block; unlinked on leaving it."""
        if not self._path.exists():
            self._file.seek(0)
            with self._path.open("wb") as copy:
                shutil.copyfileobj(self._file, copy, 1 << 24)
        try:
            yield str(self._path)
        finally:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the memory."""
        self._path.unlink(missing_ok=True)
        self._file.close()


class FileWeights:
    """`EngineWeights` in one file, for engines of this node."""

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, dtype: torch.dtype) -> None:
        """dtype: of the engines. Raises ValueError for no tensors, or a name that comes twice."""
        from ctpo_megatron.engines.weights.checksums import Checksums

        checksums = Checksums(version, dtype)
        self._snapshot = WeightSnapshot(checksums.watch(named_tensors), version)
        if not self._snapshot.names:
            self._snapshot.close()
            raise ValueError(f"weights of version {version}: no tensors given")
        self.version, self.names, self.size = version, self._snapshot.names, self._snapshot.size
        self.sums: Sums = checksums.sums

    @contextmanager
    def offered(self) -> Iterator[dict[str, Any]]:
        """See `EngineWeights`."""
        with self._snapshot.published() as path:
            yield {"path": path}

    def close(self) -> None:
        """Release the memory."""
        self._snapshot.close()


def checkpoint_names(model_path: str | Path) -> frozenset[str]:
    """Tensor names of the safetensors checkpoint in `model_path`; empty when it has another format."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(Path(model_path).glob("*.safetensors")):
        with safe_open(str(file), "pt") as handle:
            names.update(handle.keys())
    return frozenset(names)


def _disk() -> Path:
    return Path(tempfile.gettempdir())


def _new_path(directory: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=f"ctpo-weights-{os.getpid()}-", suffix=".safetensors", dir=directory)
    os.close(handle)
    return Path(name)
