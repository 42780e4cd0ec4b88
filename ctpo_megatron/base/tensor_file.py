"""Writes safetensors files tensor by tensor: of everything that passes through, one tensor is in memory at a time.

`safetensors.torch.save_file` wants all tensors of a file at once. The format (https://github.com/huggingface/safetensors)
is 8 bytes of header length, a JSON header, which spaces may pad, and the tensors one after another.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LENGTH = 8
_ENTRY = 160
"""Bytes of a header entry besides the name, at most."""


class TensorFile:
    """A safetensors file that grows by `add` and can be read after `close`.

    header_bytes: room left in front for the header, a multiple of 8; 170 bytes plus its name are enough for a tensor.
    mode: permissions of the file, less the umask.
    """

    def __init__(self, path: Path, header_bytes: int = 1 << 18, mode: int = 0o600) -> None:
        self.path, self._mode = path, mode
        self._room = header_bytes
        self._used = _ENTRY  # for the file's own metadata
        self._header: dict[str, dict[str, object]] = {}
        self._end = _LENGTH + header_bytes
        self._file: int | None = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, mode)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._header)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors so far."""
        return self._end - _LENGTH - self._room

    def has_room_for(self, name: str) -> bool:
        """Whether the header can name one more tensor."""
        return self._used + len(json.dumps(name)) + _ENTRY <= self._room

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor of any device and layout. Raises ValueError for a name given twice or too many tensors."""
        if name in self._header:
            raise ValueError(f"weights: {name!r} given twice")
        if not self.has_room_for(name):
            raise ValueError(f"{self.path}: {len(self._header)} tensors fill the header; start another file")
        data = tensor.detach().cpu().contiguous()
        start = self._end
        self._write(data.flatten().view(torch.uint8).numpy().data)
        begin = _LENGTH + self._room
        self._header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start - begin, self._end - begin],
        }
        self._used += len(json.dumps(name)) + _ENTRY

    def move(self, path: Path) -> None:
        """Continue in another file, with the content written so far."""
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, self._mode)
        done = 0
        while done < self._end:
            block = os.pread(self._descriptor, min(1 << 24, self._end - done), done)
            # Room for the header has not been written yet: a file without tensors is shorter than it says.
            done += os.pwrite(file, block, done) if block else self._end - done
        os.close(self._descriptor)
        self.path.unlink()
        self.path, self._file = path, file

    def close(self) -> None:
        """Write the header; the file is complete. Raises OSError from the file system."""
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}).encode()
        end, begin, self._end = self._end, _LENGTH + self._room, 0
        self._write(memoryview(self._room.to_bytes(_LENGTH, "little") + header))
        while self._end < begin:
            self._write(memoryview(b" " * min(1 << 20, begin - self._end)))
        self._end = end
        self._release()

    def discard(self) -> None:
        """Remove the file, finished or not."""
        self._release()
        self.path.unlink(missing_ok=True)

    @property
    def _descriptor(self) -> int:
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        return self._file

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _write(self, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, self._end)
            self._end += written
            data = data[written:]
