"""Users' parts in a run: copied into its directory, and the same code when it continues."""

from __future__ import annotations

import hashlib
import logging
import operator
import os
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ctpo_megatron.base.extensions import activate, load
from ctpo_megatron.base.files import read_note, write_json
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Config, named_extensions

log = logging.getLogger(__name__)


def loaded_files(config: Config) -> dict[str, Path]:
    """Source files that the configured users' parts were loaded from, by name in `extensions.path`; imports them.

    Raises ExtensionError when a part cannot be imported.
    """
    folders = [Path(folder).resolve() for folder in config.extensions.path or ()]
    activate(folders)
    paths = [extension.name for _, extension in named_extensions(config) if extension.is_path]
    for path in paths:
        load(path)
    installed = {Path(entry).resolve() for entry in (*sys.path, sys.prefix, sys.base_prefix) if entry}
    files = {}
    for name, module in sorted(sys.modules.items()) if paths else ():
        file = Path(os.path.realpath(getattr(module, "__file__", None) or ""))
        folder = _folder_of(file, folders, installed) if name.split(".")[0] not in _NOT_USERS else None
        if folder and file.is_file():  # torch has modules that claim files which are nowhere
            files[str(file.relative_to(folder))] = file
    return files


_NOT_USERS = {"__main__", "__mp_main__", "ctpo_megatron", "ctpo_kernels", "ctpo_sandbox", "ctpo_launchers"}


def _folder_of(file: Path, folders: Collection[Path], installed: Collection[Path]) -> Path | None:
    """The folder of `extensions.path` that a module comes from; None if it is installed, even somewhere below."""
    nearest = next((parent for parent in file.parents if parent in folders or parent in installed), None)
    return nearest if nearest in folders else None


def changed_code(config: Config, directory: Path) -> dict[str, tuple[str | None, str | None]]:
    """Files that differ from those the run was begun with: name -> sha256 recorded and sha256 now (None: no such file).

    Raises ExtensionError when a part cannot be imported.
    """
    before, now = recorded_digests(directory), _digests(loaded_files(config))
    return {
        name: (before.get(name), now.get(name))
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    }


def describe(changes: Mapping[str, tuple[str | None, str | None]]) -> str:
    """One line a file: its name, and what its SHA-256 was and is."""
    return "\n".join(f"  {name}: {old or 'absent'} -> {new or 'absent'}" for name, (old, new) in changes.items())


def recorded_digests(directory: Path) -> dict[str, str]:
    """Name -> sha256 of the users' files that a run was begun with; empty without a record, or with a damaged one."""
    record = RunPaths(directory).extensions_record
    return read_note(record, operator.itemgetter("files"), {}, "every file of users counts as changed")


def record_extensions(config: Config, directory: Path) -> None:
    """Copy the users' source files to `<run>/extensions` and write their digests to `<run>/extensions.json`.

    Where they changed (a resume that accepts it), the former copies go to `extensions.previous`, and the record keeps
    what was changed. Raises ExtensionError when a part cannot be imported.
    """
    files, paths = loaded_files(config), RunPaths(directory)
    changes, begun = changed_code(config, directory), paths.extensions_record.exists()
    if not changes:
        return
    copies, previous = paths.extensions, paths.previous_extensions
    accepted: list[Any] = []
    if begun:
        log.warning("run.accept_changed_code=true: going on with changed code\n%s", describe(changes))
        accepted = read_note(paths.extensions_record, operator.itemgetter("accepted"), [], "what was accepted is lost")
        accepted.append({name: {"was": old, "is": new} for name, (old, new) in changes.items()})
        shutil.rmtree(previous, ignore_errors=True)
        if copies.exists():
            copies.rename(previous)
    for name, file in files.items():
        (copies / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copies / name)
    record = {"files": _digests(files), "accepted": accepted}
    write_json(paths.extensions_record, record, durable=True)


def _digests(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
