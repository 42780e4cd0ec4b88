"""One archive of a bundle: `.tar.xz`, the same bytes for the same members, and what the manifest tells of it."""

from __future__ import annotations

import hashlib
import io
import lzma
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
_LARGEST = 8


@dataclass(frozen=True)
class Member:
    """A file of an archive. name: its path below the folder into which the archive is unpacked."""

    name: str
    data: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class Packed:
    """An archive that was written. added: member -> bytes by which it lengthened the archive, about."""

    name: str
    bytes: int
    sha256: str
    unpacked_bytes: int
    added: dict[str, int]


def pack(path: Path, members: Iterable[Member]) -> Packed:
    """Write an archive of the members, in their order."""
    added, unpacked = dict[str, int](), 0
    with (
        path.open("wb") as file,
        lzma.open(file, "wb", preset=9) as stream,  # its window of 64 MiB sees what Ray's programs have in common
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        for member in members:
            before = file.tell()
            entry = tarfile.TarInfo(member.name)
            entry.size, entry.mode = len(member.data), member.mode
            tar.addfile(entry, io.BytesIO(member.data))
            added[member.name] = file.tell() - before
            unpacked += len(member.data)
    with path.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    return Packed(path.name, path.stat().st_size, digest, unpacked, added)


def refuse_above(limit_mib: float, archives: Iterable[Packed]) -> None:
    """Raise ValueError that names all archives above the limit, and what is largest in them."""
    problems = [_problem(archive, limit_mib) for archive in archives if archive.bytes > limit_mib * MIB]
    if problems:
        raise ValueError("\n".join(problems))


def _problem(archive: Packed, limit_mib: float) -> str:
    largest = sorted(archive.added.items(), key=lambda item: -item[1])[:_LARGEST]
    lines = [f"  {size / MIB:6.1f} MiB  {name}" for name, size in largest]
    size = f"{archive.name} has {archive.bytes / MIB:.1f} MiB, {limit_mib:g} are allowed"
    return "\n".join([f"{size}; move or leave out members of it in the contents. The largest, about:", *lines])
