"""Finds a configuration file: the path as given, then `configs/` of the checkout, then the packaged copies."""

from __future__ import annotations

import contextlib
import difflib
import importlib.resources
import os
from collections.abc import Iterator
from pathlib import Path

from ctpo_megatron.config.problems import ConfigError, Problem

_PACKAGE = "ctpo_megatron.configs"


def config_folders() -> list[Path]:
    """Folders searched after the path as given; the packaged one exists only in an installed wheel."""
    folders = [Path(__file__).resolve().parents[2] / "configs"]
    with contextlib.suppress(ModuleNotFoundError):  # an editable install maps this package nowhere
        folders.append(Path(str(importlib.resources.files(_PACKAGE))))
    return [folder for folder in folders if folder.is_dir()]


def locate(path: str | Path) -> Path:
    """The file that a user's path refers to. Raises ConfigError listing the searched locations and close matches."""
    wanted = Path(os.path.expanduser(path))  # unlike Path, it does not fail for an unknown user
    candidates = list(_candidates(wanted))
    for candidate in candidates:
        if os.path.isfile(candidate):  # also False for a name that is too long
            return candidate
    looked = ", ".join(str(c) for c in candidates if c.suffix or not c.name)
    near = _near(wanted)
    known = f"did you mean {', '.join(near)}?" if near else "give the path of a YAML file"
    raise ConfigError([Problem("", f"no such configuration (looked for {looked})", known, where=str(path))])


def _candidates(wanted: Path) -> Iterator[Path]:
    names = [wanted] if wanted.suffix or not wanted.name else [wanted, wanted.with_suffix(".yaml")]
    yield from names
    if wanted.is_absolute():
        return
    for folder in config_folders():
        for name in names:
            inside = Path(*name.parts[1:]) if name.parts[:1] == ("configs",) and len(name.parts) > 1 else name
            yield folder / inside


def _near(wanted: Path) -> list[str]:
    """Existing YAML files with a similar name."""
    parent = wanted.parent
    files = [*parent.glob("*.yaml")] if parent.is_dir() else []
    for folder in config_folders():
        files += sorted(folder.rglob("*.yaml"))
    by_stem = {file.stem: file for file in reversed(files)}
    return [str(by_stem[stem]) for stem in difflib.get_close_matches(wanted.stem, by_stem, n=3, cutoff=0.5)]
