"""The trainer's end of a weight update: one safetensors file in shared memory, of which only the path travels."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SHARED_MEMORY = Path("/dev/shm")


def _directory(size: int) -> Path:
    """Shared memory when it can hold `size` bytes with room to spare, else the temporary directory."""
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        free = shutil.disk_usage(_SHARED_MEMORY).free
        if free > size + (16 << 20):
            return _SHARED_MEMORY
    return Path(tempfile.gettempdir())


class WeightSnapshot:
    """The weights of one version, kept so that an engine that starts later can be given them again.

    The file has a name only while `published()`; between updates it lives on as an open descriptor, so nothing is left
    behind in shared memory however the process ends, except in the middle of an update.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        from safetensors.torch import save_file

        tensors = _storable(named_tensors)
        if not tensors:
            raise ValueError(f"weights of version {version}: no tensors given")
        self.names = frozenset(tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self.version = version
        self._path = _new_path(_directory(size))
        try:
            save_file(tensors, str(self._path))
            self._file: IO[bytes] = open(self._path, "rb")  # noqa: SIM115 - held for the life of the snapshot
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise

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


def _storable(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors, each with memory of its own (safetensors refuses tied ones)."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named_tensors:
        if name in tensors:
            raise ValueError(f"weights: {name!r} given twice")
        tensor = tensor.detach().cpu().contiguous()
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return tensors


def checkpoint_names(model_path: str | Path) -> frozenset[str]:
    """Tensor names of the safetensors checkpoint in `model_path`; empty when it has another format."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(Path(model_path).glob("*.safetensors")):
        with safe_open(str(file), "pt") as handle:
            names.update(handle.keys())
    return frozenset(names)


def _new_path(directory: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=f"ctpo-weights-{os.getpid()}-", suffix=".safetensors", dir=directory)
    os.close(handle)
    return Path(name)
