"""The model that a run keeps after its supervised stage: RL starts from it again when the run is resumed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ctpo_megatron.base.files import read_mapping, write_json
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.policy import CheckpointError


def has_sft_model(run: Path) -> bool:
    """Return whether the run has finished its supervised stage: the record is written last."""
    return RunPaths(run).sft_record.is_file()


def record_sft_model(run: Path) -> None:
    """Record the supervised stage as finished, with the blake2b-128 of each file of the model."""
    folder = RunPaths(run).sft_model
    files = {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(RunPaths(run).sft_record, {"files": files}, durable=True)


def checked_sft_model(run: Path) -> Path:
    """Return the folder of the model. Raises CheckpointError unless every file is as it was written."""
    paths = RunPaths(run)
    files = read_mapping(paths.sft_record)["files"]
    broken = [name for name, digest in files.items() if not _is(paths.sft_model / name, digest)]
    if broken:
        raise CheckpointError(
            f"the model after SFT is damaged or was changed: {', '.join(broken)} in {paths.sft_model}; remove "
            f"{paths.sft_record} to do the SFT again"
        )
    return paths.sft_model


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and _digest(path) == digest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
