"""Checks of the files and directories that a run reads, and of the export that it writes."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import (
    PREPARED,
    PrepareConfig,
    Problem,
    is_replaceable,
    stored_tensors,
    tokenizer_problems,
    will_be_prepared,
)
from ctpo_megatron.preflight.check import RunContext


def check_model_directory(context: RunContext) -> Iterator[Problem]:
    """Weights that are whole and fit config.json, and a tokenizer; nothing of a model still to be prepared."""
    directory = Path(context.config.model.path)
    if (directory / "config.json").is_file():
        yield from stored_tensors(directory, context.spec)[1]
        yield from tokenizer_problems(directory)


def check_export(context: RunContext) -> Iterator[Problem]:
    """The export replaces a directory of its name: it must not be anything else that is there, or is needed."""
    config = context.config
    key, name = "export.directory", config.export.directory
    if not config.export.enabled:
        return
    if name in (".", "..", *RunPaths.names()):
        what = "is not a name" if name in (".", "..") else "is what the run writes something else to"
        yield context.error(key, what, "choose another, e.g. model")
        return
    target = (config.run.directory / name).resolve()
    needed = [f"{name} ({path})" for name, path in config.inputs() if path.resolve().is_relative_to(target)]
    if needed:
        message = f"in {config.run.directory} would be replaced, but holds {', '.join(needed)}"
        yield context.error(key, message, "choose another name")
    elif not config.run.overwrite and not is_replaceable(target):
        message = f"exists in {config.run.directory}, and is no model directory: it will not be replaced"
        yield context.error(key, message, "choose another name, or move it away")


def check_prompt_files(context: RunContext) -> Iterator[Problem]:
    """Prompt files that are neither there nor going to be written by `prepare`."""
    config = context.config
    wanted: list[tuple[str, Iterable[str]]] = [("data.train", config.data.train), ("data.eval", config.data.eval)]
    if config.sft:
        wanted.append(("sft.data", config.sft.data))
    for key, files in wanted:
        for file in files:
            path = Path(file)
            if not will_be_prepared(config.prepare, path) and not path.exists() and not glob.has_magic(file):
                yield Problem(key, "no such file", _file_hint(config.prepare, path), file)


def _file_hint(prepare: PrepareConfig | None, file: Path) -> str:
    if prepare and file.absolute().is_relative_to(Path(prepare.directory).absolute()):
        return f"`prepare` writes {', '.join(PREPARED[1:])} there"
    if str(file).count("/") == 1 and not file.parent.exists():
        return f"a data set of the Hub first: hf download {file} --repo-type dataset --local-dir DIRECTORY"
    return "give the path of a data file, or of a folder of them (docs/data.md)"
