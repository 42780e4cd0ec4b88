"""Keeps one GPU architecture of a CUDA shared library. NVIDIA's nvprune takes objects and archives, but no `.so`.

A shared library carries its GPU code in the ELF section `.nv_fatbin`, and `__nv_relfatbin` for relocatable code. Such a
section holds fatbins, one per source file, with zeros between them (little-endian):

    fatbin   u32 magic 0xBA55ED50, u16 version, u16 bytes of this header, u64 bytes of the entries that follow
    entry    u16 kind (1 PTX, 2 cubin), u16 version, u32 bytes of this header, u64 bytes of code, ..., u32 architecture
             at byte 28, ...; then the code, compressed or not

Entries that stay move to the front of their fatbin, the size in its header shrinks, and zeros fill the rest. Nothing
else moves, so every pointer into the section stays right. The file keeps its length but compresses well.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, CUBIN = 1, 2


@dataclass(frozen=True)
class Entry:
    """Code for one architecture (90: sm_90 and sm_90a). size: bytes, its header included."""

    kind: int
    architecture: int
    start: int
    size: int


def prune(library: bytearray, architecture: int) -> tuple[int, int]:
    """Zero the GPU code of other architectures in place; returns bytes of GPU code before and after.

    A fatbin without a cubin of the architecture keeps what could run there: cubins of the same major version that are
    not newer, and PTX that is not newer. One without any of these stays whole, as a driver expects an entry.

    Raises ValueError for a fatbin that does not have the form above.
    """
    before = after = 0
    for start, end in _sections(library):
        while (start := library.find(MAGIC, start, end)) >= 0:
            header, size = struct.unpack_from("<HQ", library, start + 6)
            first, stop = start + header, start + header + size
            if stop > end:
                raise ValueError(f"the fatbin at byte {start} ends at {stop}, its section at {end}")
            kept = b"".join(
                library[e.start : e.start + e.size] for e in _usable(_entries(library, first, stop), architecture)
            )
            struct.pack_into("<Q", library, start + 8, len(kept))
            library[first:stop] = kept.ljust(size, b"\0")
            before, after, start = before + size, after + len(kept), stop
    return before, after


def _sections(library: bytearray) -> Iterator[tuple[int, int]]:
    """Start and end of each section with GPU code. Nothing for a file that is not ELF of 64 bits."""
    if library[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", library, 0x28)
    stride, number, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + index * stride) for index in range(number)]
    for name, _, _, _, offset, size in headers:
        begin = headers[names][4] + name
        if library[begin : library.index(b"\0", begin)].decode() in SECTIONS:
            yield offset, offset + size


def _entries(library: bytearray, start: int, stop: int) -> list[Entry]:
    entries = []
    while start < stop:
        kind, _, header, code = struct.unpack_from("<HHIQ", library, start)
        (architecture,) = struct.unpack_from("<I", library, start + 28)
        entry = Entry(kind, architecture, start, header + code)
        start += entry.size
        if header < 32 or start > stop or kind not in (PTX, CUBIN):
            raise ValueError(f"the entry at byte {entry.start} has kind {kind} and {entry.size} bytes; {stop} ends it")
        entries.append(entry)
    return entries


def _usable(entries: list[Entry], architecture: int) -> list[Entry]:
    def could_run(entry: Entry) -> bool:
        same_major = entry.architecture // 10 == architecture // 10
        return entry.architecture <= architecture and (entry.kind == PTX or same_major)

    exact = [entry for entry in entries if entry.kind == CUBIN and entry.architecture == architecture]
    return exact or list(filter(could_run, entries)) or entries
