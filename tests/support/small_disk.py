"""A small disk of its own that a test fills and frees."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A tmpfs at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Leave no byte of room."""
        with (self.path / "filler").open("ab", buffering=0) as file:
            for size in (1 << 16, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        """Give the room back."""
        (self.path / "filler").unlink()


@contextmanager
def small_disk(path: Path, size: str = "1m") -> Iterator[SmallDisk]:
    """Mount it, where this process may; else skip the test."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs a tmpfs of its own: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
