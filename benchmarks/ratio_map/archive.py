"""What the runs of a task begin with, in one file beside the results: the model after SFT, and recordings from it.

With it a cell can be measured again, or the next one, on another machine from the same bits.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

MODEL = Path("sft", "sft_model")
RECORDINGS = "recording-seed*"
KEPT = ("config.yaml", "data.json", "rendering.json", "metrics.jsonl", "trajectories")
"""Of a recording: what a replay reads."""


def pack(folder: Path, file: Path, seeds: frozenset[int], root: Path) -> None:
    """Write the start model of a task's folder, and its recordings of these seeds. Raises FileNotFoundError.

    root: of the checkout, which the paths in configurations become relative to.
    """
    with tarfile.open(file, "w:xz", preset=9) as archive:
        for path in _members(folder, seeds):
            member = _without_owner(archive.gettarinfo(path, str(path.relative_to(folder))))
            content = path.read_bytes()
            if path.suffix in (".yaml", ".json"):
                content = content.replace(f"{root}/".encode(), b"")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def unpack(file: Path, folder: Path) -> None:
    """Write what `pack` stored into a task's folder. Nothing where there is no such file."""
    if file.exists():
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")


def _members(folder: Path, seeds: frozenset[int]) -> Iterator[Path]:
    yield from sorted((folder / MODEL).iterdir())
    for run in sorted(folder.glob(RECORDINGS)):
        if run.is_dir() and int(run.name.removeprefix(RECORDINGS[:-1])) in seeds:
            yield from (
                path for name in KEPT for path in sorted({run / name, *(run / name).glob("*")}) if path.is_file()
            )


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member without owner and time, so that packing the same files gives the same bytes."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member
