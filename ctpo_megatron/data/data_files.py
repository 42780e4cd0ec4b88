"""Finds data files: which files a path, a folder or a pattern names. Needs no library that reads them."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ctpo_megatron.base.files import is_pattern, matching
from ctpo_megatron.data.hub import HubFiles
from ctpo_megatron.data.problems import Problems

JSON = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".zst", ".bz2")
"""Suffixes after a suffix of JSON: the file is unpacked as it is read."""
_DATA = (".parquet", *JSON, ".arrow")
_IN_FOLDERS = (".parquet", ".jsonl", ".ndjson")
"""What is read of a folder; a `.json` in it is a note, as `dataset_infos.json`."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_SPLIT = re.compile(
    r"(?<![a-z])(?:train(?:ing)?|test(?:ing)?|val(?:id(?:ation)?)?|dev(?:elopment)?|eval(?:uation)?|held|(?:held|hold)out)"
    r"(?![a-z])"
)
"""A word of a name, in small letters, that says which split a file is of."""


def find_files(
    patterns: Sequence[str], problems: Problems, hub: Mapping[str, HubFiles] = MappingProxyType({})
) -> list[Path]:
    """Files for paths, folders and glob patterns, in the order given (matches of a pattern sorted, `**` allowed).

    What matches a pattern must be of one split, like the files of a folder. hub: what names of the Hub stand for.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if pattern in hub:
            files += hub[pattern].files
            if hub[pattern].problem:
                problems.general(hub[pattern].problem)
        elif is_pattern(pattern):
            files += _matches(pattern, problems)
        elif path.is_dir():
            files += _files_of(path, problems)
        elif path.is_file():
            files.append(path)
        else:
            problems.general(f"no such file: {pattern}; {_nearby(path)}")
    for file in sorted({file for file in files if files.count(file) > 1}):
        problems.general(f"{file}: given twice")
    return files


def data_stem(file: Path) -> str:
    """Return the name of a data file without what says how it is read: "a" of `a.jsonl.gz`."""
    return file.with_suffix("").stem if file.suffix in _PACKED and data_kind(file) in JSON else file.stem


def _files_of(folder: Path, problems: Problems) -> list[Path]:
    """The data files of a folder: written by `save_to_disk`, or parquet files of one split."""
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(str(folder / entry.name) for entry in sorted(folder.iterdir()) if entry.is_dir())
        problems.general(f"{folder}: holds several splits; name one: {splits}")
        return []
    if (folder / "state.json").is_file():
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            return [folder / each["filename"] for each in state["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            problems.general(f"{folder}: state.json does not name its data files ({type(error).__name__}: {error})")
            return []
    files = sorted(file for file in folder.iterdir() if data_kind(file) in _IN_FOLDERS and file.is_file())
    suffixes = sorted({file.name.removeprefix(data_stem(file)) for file in files})
    shards = {_SHARD.sub("", data_stem(file)): file for file in files if _SHARD.search(data_stem(file))}
    named = _splits(files)
    several = named if len(named) > 1 else shards
    if len(suffixes) > 1:
        kinds = ", ".join(str(folder / f"*{suffix}") for suffix in suffixes)
        problems.general(f"{folder}: holds files of several kinds; name one: {kinds}")
        return []
    if len(several) > 1:
        names = ", ".join(
            str(folder / f"{_SHARD.sub('-*', data_stem(file))}{suffixes[0]}") for file in several.values()
        )
        problems.general(f"{folder}: holds several splits; name one: {names}")
        return []
    if not files:
        problems.general(f"{folder}: a folder without data files; {_nearby(folder / 'x')}")
    return files


def _matches(pattern: str, problems: Problems) -> list[Path]:
    """The files that match a pattern, all of one split."""
    files = [path for path in matching(pattern) if path.is_file()]
    if not files:
        problems.general(f"no file matches {pattern}; {_nearby(Path(pattern))}")
    if len(splits := _splits(files)) > 1:
        names = ", ".join(map(str, splits.values()))
        problems.general(f"{pattern}: matches several splits; name the files, or one split: {names}")
        return []
    return files


def _splits(files: Sequence[Path]) -> dict[str, Path]:
    """The first file of each split that names tell, the folders that files have in common aside."""
    folder = os.path.commonpath([file.parent for file in files]) if files else ""
    firsts: dict[str, Path] = {}
    for file in files:
        inside = file.relative_to(folder).with_name(data_stem(file))
        if words := _SPLIT.findall(str(inside).lower()):
            firsts.setdefault(words[-1], file)
    return firsts


def data_kind(file: Path) -> str:
    """Return the suffix that says how to read a file: `.jsonl` of `a.jsonl.gz`."""
    return file.with_suffix("").suffix if file.suffix in _PACKED else file.suffix


def _nearby(path: Path) -> str:
    """Suggestions for a path that does not exist: the nearest existing parent folder and the data files in it."""
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(entry.name for entry in folder.iterdir() if data_kind(entry) in _DATA or entry.is_dir())
    ranked = difflib.get_close_matches(path.name, names, n=5, cutoff=0.3) or names[:5]
    return f"{folder} holds {', '.join(ranked)}" if ranked else f"{folder} holds no parquet file"
