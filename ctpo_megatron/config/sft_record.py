"""What a run records of its SFT model (`sft_model.json`), by which other runs judge whether they can start from it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from ctpo_megatron.base.files import DamagedFileError, read_mapping, write_json
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config.problems import ConfigError, Problem
from ctpo_megatron.config.schema import Config, SftConfig

_KEY = "sft.from"
_RENDERED_BY = (
    "model.chat_template",
    "model.chat_template_kwargs",
    "data.system_prompt",
    "data.tool_in_prompt",
    "rollout.tool_parser",
    "rollout.tools",
)
"""Keys, besides tokenizer and data, that decide what a conversation looks like to the model."""


@dataclass(frozen=True)
class SftRecord:
    """The SFT that a run has done.

    sft, prepare: these sections of its configuration. rendered_by: what else its conversations were rendered with, by
    key. files: blake2b-128 of each file of the model.
    """

    seed: int
    model: str
    sft: dict[str, Any]
    prepare: dict[str, Any] | None
    rendered_by: dict[str, Any]
    files: dict[str, str]

    @classmethod
    def of(cls, config: Config) -> Self:
        """Of a run whose SFT model has just been written. Reads all of it."""
        assert config.sft is not None
        folder = RunPaths(config.run.directory).sft_model
        files = {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        prepare = config.prepare.model_dump(mode="json") if config.prepare else None
        return cls(config.run.seed, config.model.path, sft_settings(config.sft), prepare, rendered_by(config), files)

    @property
    def digest(self) -> str:
        """Of the whole model."""
        lines = [f"{name} {digest}\n" for name, digest in self.files.items()]
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()

    def write(self, run: Path) -> None:
        """Record the SFT of a run as finished."""
        write_json(RunPaths(run).sft_record, asdict(self), durable=True)

    def check_files(self, run: Path) -> None:
        """Read the whole model of `run` and raise ConfigError unless every file is as it was written."""
        folder = RunPaths(run).sft_model
        broken = [name for name, digest in self.files.items() if self.digest_in(folder, name) != digest]
        if broken:
            message = f"its SFT model is damaged or was changed: {', '.join(broken)} in {folder}"
            raise ConfigError([Problem(_KEY, message, "do the SFT again", str(run))])

    @staticmethod
    def digest_in(folder: Path, name: str) -> str | None:
        """Digest of a file as the record has it; None: it is not there."""
        return _digest(folder / name) if (folder / name).is_file() else None


_RECORD = TypeAdapter(SftRecord)


def sft_settings(sft: SftConfig) -> dict[str, Any]:
    """What an SFT model follows from, of the section `sft`."""
    return sft.model_dump(mode="json", exclude={"from_", "export"})


def rendered_by(config: Config) -> dict[str, Any]:
    """The values of the keys that decide what conversations look like, tokenizer and data aside."""
    tree = config.model_dump(mode="json")
    return {key: reduce(lambda node, part: node[part], key.split("."), tree) for key in _RENDERED_BY}


def has_sft_record(run: Path) -> bool:
    """Whether the run has finished its SFT and kept the model."""
    return RunPaths(run).sft_record.is_file()


def read_sft_record(run: Path) -> SftRecord:
    """The finished SFT of a run. Raises ConfigError saying why there is none."""
    path = RunPaths(run).sft_record
    try:
        return _RECORD.validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        reason, fix = _why_absent(run)
    except ValidationError as error:
        reason, fix = f"{path} is damaged ({error.errors()[0]['msg']})", "do the SFT again"
    except OSError as error:
        reason, fix = f"{path} cannot be read: {error.strerror}", "give a run directory, e.g. runs/first"
    raise ConfigError([Problem(_KEY, reason, fix, str(run))])


def _why_absent(run: Path) -> tuple[str, str]:
    paths = RunPaths(run)
    if not paths.config.is_file():
        return f"is no run directory (no {paths.config.name} in it)", "give one that has done SFT, e.g. runs/first"
    try:
        sft = read_mapping(paths.config).get("sft")
    except (DamagedFileError, OSError) as error:
        return str(error), "give another run"
    if sft is None:
        return "is a run without SFT (sft: null)", "give one with SFT; to start from its result: model.path"
    if sft.get("from") is not None:
        return "started from the SFT model of another run itself", f"give that run: {_KEY}={sft['from']}"
    if not sft.get("export", False):
        return "did not keep its SFT model (sft.export, or it is of an earlier version)", "do its SFT again"
    return f"has not finished its SFT (no {paths.sft_record.name})", "finish it first: run.resume=true"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
