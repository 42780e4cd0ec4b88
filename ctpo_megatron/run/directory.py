"""Creates the directory of a run, and never destroys an earlier run by accident; one process at a time writes to it."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ctpo_megatron import __version__
from ctpo_megatron.base.extensions import loaded_files
from ctpo_megatron.base.files import DamagedFileError, claim, read_mapping, read_note, write_json, write_text
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.text import printable, redacted
from ctpo_megatron.config import (
    Chosen,
    flattened,
    named_extensions,
    resolved_objective,
    stored_settings,
    without_removed,
)
from ctpo_megatron.run.provenance import describe_environment, record_extensions

if TYPE_CHECKING:
    from ctpo_megatron.config.schema import Config, RunConfig


log = logging.getLogger(__name__)

# Of one start, not of the run, and what they are without it.
_ONE_TIME = {"overwrite": False, "resume": False, "deadline": None}


class RunDirectoryError(Exception):
    """The run directory cannot be used as asked; the message says what to type instead."""


def open_run_directory(config: Config) -> Path:
    """Create or replace `<run.root>/<run.name>`, write config.yaml into it and return its path; or reopen it.

    Call it on one process only: the directory belongs to that process until it ends. What is reopened says what it said
    before until `take_over`. Raises RunDirectoryError when the directory must not be touched as configured, or cannot
    be written to.
    """
    try:
        return _open(config)
    except OSError as error:
        raise RunDirectoryError(
            f"run.root={config.run.root}: {error}. Type run.root=DIR with a folder that can be written to and has space"
        ) from error


def _open(config: Config) -> Path:
    run, directory = config.run, config.run.directory
    paths = RunPaths(directory)
    if run.overwrite and run.resume:
        raise RunDirectoryError("run.overwrite=true and run.resume contradict each other; give one of them")
    exists = paths.config.exists()
    resumed = exists if run.resume == "auto" else run.resume
    if resumed:
        _check_resumable(directory)
        _own(directory)
        for key, (was, now) in (_changes(directory, stored_settings(config)) or {}).items():
            log.warning("resuming with another value: %s = %s (was %s)", key, redacted(now, key), redacted(was, key))
    elif exists:
        if not run.overwrite:
            raise RunDirectoryError(
                f"{directory} already holds a run. Type one of:\n"
                f"  run.overwrite=true   delete it and start again\n"
                f"  run.name=other       keep it and use another name\n"
                f"  run.resume=true      continue from its last checkpoint (auto: start where there is no run)"
            )
        # Unlocked at once: NFS cannot delete a folder with an open file in it.
        os.close(_own(directory))
        _delete(directory, [*(path for _, path in config.inputs()), *_users_files(config).values()])
    elif _is_occupied(directory):
        raise RunDirectoryError(
            f"{directory} exists, has no {paths.config.name} and so is not a run directory: it will not be touched. "
            f"Type run.name=other, or move it away"
        )
    if not resumed:
        directory.mkdir(parents=True, exist_ok=True)
        _own(directory)
        _describe(config)
    record_extensions(_users_files(config), directory)
    return directory


def take_over(config: Config) -> None:
    """Write this run's configuration into a directory that was reopened, and keep the former one if it differs.

    Call it once nothing can refuse the resume any more, and before anything is discarded.
    """
    if not config.run.resume:
        return
    directory, settings = config.run.directory, stored_settings(config)
    if _changes(directory, settings):
        paths = RunPaths(directory)
        shutil.copyfile(paths.config, paths.previous_config)
    _describe(config)


def is_finished(run: RunConfig) -> bool:
    """Return whether `run.resume: auto` has nothing to do: the run has ended with all of `run.steps` done."""
    if run.resume != "auto":
        return False
    if _facts(run.directory).get("finished_steps", -1) < run.steps:  # not there: it has not, or was resumed since
        return False
    log.info("%s has done its %d steps (run.steps): nothing is left to do", run.directory, run.steps)
    return True


def former_choice(run: RunConfig) -> Chosen | None:
    """Return what `auto` of the policy was when the run that is to be resumed was begun; None: nothing was chosen."""
    if not run.resume or not RunPaths(run.directory).config.exists():
        return None
    found = Chosen(**_facts(run.directory).get("chosen", {}))
    return None if found.gpu_gib is None else found


def record_finish(directory: Path, steps: int) -> None:
    """Record the finished step count. Resuming the run clears it."""
    facts = {"version": __version__} | _facts(directory) | {"finished_steps": steps}
    write_json(RunPaths(directory).environment, facts, durable=True)


def _facts(directory: Path) -> dict[str, Any]:
    path = RunPaths(directory).environment
    return read_note(path, dict, {}, "which version wrote it, and whether it ended, is unknown")


def written_by_another_version(place: Path, directory: Path) -> str:
    """Return the refusal of a run directory, or of a checkpoint in one, whose contents this version does not read."""
    facts = _facts(directory)
    written = facts.get("version") or facts.get("packages", {}).get("ctpo-megatron")
    version = f" ({written})" if written else ""
    return (
        f"{place} was written by another version of ctpo-megatron{version}, and version {__version__} cannot continue "
        "it. Finish the run with the version that began it, or start a new one (run.name=other), with the run's export "
        "as model.path"
    )


def _own(directory: Path) -> int:
    try:
        return claim(RunPaths(directory).owner)
    except BlockingIOError as error:
        raise RunDirectoryError(
            f"{directory} is being written by {error}. Wait until it has ended, end it, or type run.name=other"
        ) from error


def _check_resumable(directory: Path) -> None:
    config = RunPaths(directory).config
    if not config.exists():
        raise RunDirectoryError(
            f"run.resume=true, but {directory} holds no run ({config.name} is missing). "
            f"Type run.resume=auto to start one, or run.name=other for the run you mean"
        )
    facts = _facts(directory)
    if facts and "version" not in facts:
        raise RunDirectoryError(written_by_another_version(directory, directory))


def _is_occupied(directory: Path) -> bool:
    """Whether anything is in the directory but the lock that a job leaves which was killed at its start."""
    if not directory.exists():
        return False
    return not directory.is_dir() or any(entry != RunPaths(directory).owner for entry in directory.iterdir())


def _delete(directory: Path, inputs: Iterable[Path]) -> None:
    """Remove a run directory, unless something that is not a product of the run lives inside of it.

    inputs: files that the run reads.
    """
    inside = list(dict.fromkeys(p for p in inputs if p.resolve().is_relative_to(directory.resolve())))
    if Path.cwd().resolve().is_relative_to(directory.resolve()):
        inside.append(Path.cwd())
    if inside:
        listing = ", ".join(str(path) for path in inside)
        raise RunDirectoryError(
            f"run.overwrite=true would delete what this run needs: {listing}. Move it out of {directory}, "
            f"or type run.name=other"
        )
    place = directory.resolve()  # a link, say to a larger disk, stays, and the new run is written there, too
    # Renamed first: a deletion cut short must not leave half a run that is no longer recognized as one.
    aside = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    place.rename(aside / place.name)
    place.mkdir()
    shutil.rmtree(aside)


def _users_files(config: Config) -> dict[str, Path]:
    """Source files of the configured users' parts, by name; imports them."""
    paths = [extension.name for _, extension in named_extensions(config) if extension.is_path]
    return loaded_files(config.extensions.path or (), paths)


def _describe(config: Config) -> None:
    """Write the resolved configuration, with the one-time switches off: the file can be trained from again safely.

    And code, command, machine and objective of this start. Keys of the objective stay as given, so its numbers are in a
    comment: who reuses the file with another preset means all of that preset.
    """
    settings, paths = stored_settings(config), RunPaths(config.run.directory)
    settings["run"] |= _ONE_TIME
    settings["data"]["rerender"], settings["checkpoint"]["load"] = False, None
    objective = resolved_objective(config.objective)
    sections = {
        name: yaml.safe_dump({name: values}, sort_keys=False, allow_unicode=True) for name, values in settings.items()
    }
    sections["objective"] = f"# {printable(objective['summary'])}\n{sections['objective']}"
    write_text(paths.config, "".join(sections.values()), durable=True)
    facts = {**describe_environment(), "objective": objective, "chosen": config.policy.chosen._asdict()}
    write_json(paths.environment, facts, durable=True)


def _changes(directory: Path, settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    """Every key whose value differs from the run being continued: what it was and is; None: unknown."""
    try:
        former = dict(flattened(without_removed(read_mapping(RunPaths(directory).config))))
    except DamagedFileError as error:
        log.warning("%s: which values differ from the run's is unknown", error)
        return None
    current = dict(flattened(settings))
    not_compared = {"checkpoint.load", "data.rerender", *(f"run.{name}" for name in _ONE_TIME)}
    return {
        key: (former.get(key), current.get(key))
        for key in sorted(former.keys() | current.keys())
        if former.get(key) != current.get(key) and key not in not_compared
    }
