"""Which files of which wheels go into which archive: `contents.yaml`, applied to the wheels."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from benchmarks.gpu_bundle import fatbin
from benchmarks.gpu_bundle.archive import Member


@dataclass(frozen=True)
class Contents:
    """What `contents.yaml` says; each key is explained there."""

    python: str
    architectures: list[str]
    lock: str
    archives: dict[str, dict[str, list[str]]]
    models: str
    from_source: list[str]
    prune: list[str]
    left_out: dict[str, str]
    machine: list[str]
    not_needed: dict[str, list[str]]

    @classmethod
    def read(cls, path: Path) -> Contents:
        """Raise TypeError that names a key which is absent or unknown."""
        return cls(**yaml.safe_load(path.read_text(encoding="utf-8")))

    @property
    def packages(self) -> list[str]:
        """All that are carried."""
        return [package for archive in self.archives.values() for package in archive["packages"]]


@dataclass
class Selection:
    """The files that are carried, by archive and wheel. left_out: files and bytes of the others, by pattern."""

    contents: Contents
    files: dict[str, dict[Path, list[str]]]
    left_out: dict[str, Counter[str]]
    pruned: dict[str, dict[str, int]] = field(default_factory=dict)
    """Library -> bytes of GPU code before and after; there once its archive was read."""

    @classmethod
    def of(cls, contents: Contents, wheels: dict[str, Path]) -> Selection:
        """wheels: by package."""
        moved = {name: archive for archive, one in contents.archives.items() for name in one.get("members", ())}
        files: dict[str, dict[Path, list[str]]] = {archive: {} for archive in contents.archives}
        left_out: dict[str, Counter[str]] = {pattern: Counter() for pattern in contents.left_out}
        for archive, one in contents.archives.items():
            for wheel in (wheels[package] for package in one["packages"]):
                for info in zipfile.ZipFile(wheel).infolist():
                    pattern = next((p for p in contents.left_out if fnmatchcase(info.filename, p)), None)
                    if pattern and info.filename not in moved:
                        left_out[pattern].update(files=1, bytes=info.file_size)
                    elif not info.is_dir():
                        files[moved.get(info.filename, archive)].setdefault(wheel, []).append(info.filename)
        return cls(contents, files, left_out)

    def members(self, archive: str, architecture: int) -> Iterator[Member]:
        """Read the files of an archive. architecture: the one whose GPU code stays, 90 for sm_90."""
        for wheel, names in self.files[archive].items():
            with zipfile.ZipFile(wheel) as opened:
                for name in names:
                    mode = 0o755 if opened.getinfo(name).external_attr >> 16 & 0o111 else 0o644
                    yield Member(name, self._pruned(name, opened.read(name), architecture), mode)

    def _pruned(self, name: str, data: bytes, architecture: int) -> bytes:
        if not any(fnmatchcase(name, pattern) for pattern in self.contents.prune):
            return data
        library = bytearray(data)
        before, after = fatbin.prune(library, architecture)
        if before:
            self.pruned[name] = {"before": before, "after": after}
        return bytes(library)


def model_members(model: Path) -> Iterator[Member]:
    """The files of a model's folder, links followed, as `models/NAME/...`."""
    for path in sorted(model.rglob("*")):
        if path.is_file():
            yield Member(f"models/{model.name}/{path.relative_to(model)}", path.read_bytes())
