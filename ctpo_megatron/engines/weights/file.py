"""The transport by one safetensors file in shared memory, of which only the path travels."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ctpo_megatron.engines.weights.offer import EngineFacts, Ranks, WeightOffer, WeightSource
from ctpo_sandbox import temporary

if TYPE_CHECKING:
    import torch

    from ctpo_megatron.engines.updates import PendingUpdate
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
    temporary directory once that is full. The file has a name only while it is published. Between updates it is an open
    descriptor, so nothing is left in shared memory when the process ends then. The next publication is a new file with
    a new name: under the former one another user may have put a file or a link.
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
        self.names, self.size = writer.names, writer.tensor_bytes
        self._path: Path | None = writer.path
        self._readers = 0
        self._file: IO[bytes] = open(writer.path, "rb")  # noqa: SIM115 - held for the life of the snapshot

    def publish(self) -> str:
        """Path of the file, which exists until `unpublish` was called as often. Raises OSError."""
        if self._path is None:
            self._path = self._copied()
        self._readers += 1
        return str(self._path)

    def _copied(self) -> Path:
        size = os.fstat(self._file.fileno()).st_size
        handle, path = _new_file(_SHARED_MEMORY if _has_space(_SHARED_MEMORY, size) else _disk())
        self._file.seek(0)
        try:
            with os.fdopen(handle, "wb") as copy:
                shutil.copyfileobj(self._file, copy, 1 << 24)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def unpublish(self) -> None:
        """One reader of the file has ended; the last one takes the file's name away."""
        self._readers -= 1
        if not self._readers:
            self._unlink()

    def close(self) -> None:
        """Release the memory."""
        self._unlink()
        self._file.close()

    def _unlink(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            temporary.forget(self._path)
        self._path = None


class FileOffer:
    """A `WeightOffer` in one file of rank zero's node, for engines of that node."""

    kept = True

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, dtype: torch.dtype) -> None:
        """dtype: of the engines. Raises ValueError for no tensors, or a name that comes twice."""
        from ctpo_megatron.engines.weights.checksums import Checksums

        self.began = time.monotonic()
        checksums = Checksums(version, dtype)
        self._snapshot = WeightSnapshot(checksums.watch(named_tensors), version)
        if not self._snapshot.names:
            self._snapshot.close()
            raise ValueError(f"weights of version {version}: no tensors given")
        self.version, self.names, self.size = version, self._snapshot.names, self._snapshot.size
        self.sums: Sums = checksums.sums

    def begin(self, update: PendingUpdate) -> None:
        """See `WeightOffer`."""
        update.tell({"path": self._snapshot.publish()})

    def transfer(self) -> None:
        """The tensors are in the file already."""

    def end(self) -> None:
        """See `WeightOffer`."""
        self._snapshot.unpublish()

    def close(self) -> None:
        """Release the memory."""
        self._snapshot.close()


@dataclass
class SentElsewhere:
    """The `WeightOffer` of a rank that helped to gather tensors, which rank zero offers."""

    version: int
    names: frozenset[str] = frozenset()
    size: int = 0
    began: float = 0.0
    kept: bool = True
    sums: Sums = field(default_factory=dict)

    def begin(self, update: PendingUpdate) -> None:
        """Rank zero's is begun."""

    def transfer(self) -> None:
        """The tensors are in rank zero's file already."""

    def end(self) -> None:
        """Rank zero's ends."""

    def close(self) -> None:
        """Nothing to release."""


class FileTransport:
    """For engines on rank zero's node. Every tensor is gathered on all ranks, one at a time; rank zero writes them."""

    def __init__(self, ranks: Ranks, facts: EngineFacts) -> None:
        self._ranks, self._facts = ranks, facts

    def offer(self, source: WeightSource, version: int) -> WeightOffer:
        """See `WeightTransport`."""
        if self._ranks.is_rank_zero:
            return FileOffer(source.weights(), version, self._facts.dtype)
        deque(source.weights(), maxlen=0)  # a loop would keep each tensor while the next one is gathered
        return SentElsewhere(version)

    def close(self) -> None:
        """Nothing lasts longer than an offer."""


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


def _new_file(directory: Path) -> tuple[int, Path]:
    """An open file of ours alone (mode 0600), and its path."""
    return temporary.new_file(f"ctpo-weights-{os.getpid()}-", ".safetensors", directory)


def _new_path(directory: Path) -> Path:
    handle, path = _new_file(directory)
    os.close(handle)
    return path
