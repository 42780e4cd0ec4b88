"""Reads what a job of another trainer sets. Scripts are read as text, never run.

What is no literal becomes `NO_DEFAULT`: its value is not guessed.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ctpo_megatron.config import NO_DEFAULT, flattened, peer_table
from ctpo_megatron.init.prompts import InitError

_ASSIGNED = re.compile(r"^([ \t]*)(?:export[ \t]+)?(\w+)=(.*)$", re.MULTILINE)
_SECTIONS = {"actor_rollout_ref", "algorithm", "trainer"}
"""Sections of verl that no other trainer's files have."""
_PRODUCT = re.compile(r"\$\(\( *(\d+) *\* *(\d+) *\)\)")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w@/]*(?:\.[\w@/]+)+|--config-(?:name|path))=(.*)", re.DOTALL)


def read_peer_file(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the trainer, told by the content, and what its job sets. Raises InitError for a file without such
    a job.
    """
    if not file.is_file():
        raise InitError(f"--from {file}: no such file")
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            given = _keywords(ast.parse(text))
        elif file.suffix in (".json", ".yaml", ".yml"):
            tree = OmegaConf.to_container(OmegaConf.create(text))
            given = {str(key): value for key, value in tree.items()} if isinstance(tree, Mapping) else {}
        else:
            given = _overrides(text)
    except InitError:
        raise
    except (SyntaxError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise InitError(f"--from {file}: cannot be read: {error}") from error
    if any(name in given and not key.of for name, key in peer_table("trl").keys.items()):
        return "trl", {name: _known(value) for name, value in given.items()}
    # The table leaves out this section, and `_target_` is a class.
    leaves = {name.removeprefix("actor_rollout_ref."): _known(value) for name, value in flattened(given)}
    for name in (name for name, key in peer_table("verl").keys.items() if key.default == {}):
        below = {leaf: leaves.pop(leaf) for leaf in [*leaves] if leaf.startswith(f"{name}.")}
        leaves |= {name: {leaf.removeprefix(f"{name}."): value for leaf, value in below.items()}} if below else {}
    if given.keys() & _SECTIONS and leaves.keys() & peer_table("verl").keys.keys():
        return "verl", {name: value for name, value in leaves.items() if not name.endswith("_target_")}
    raise InitError(f"--from {file}: is not a job of TRL or verl: it has neither GRPOConfig(...) nor their keys")


def _known(value: Any) -> Any:
    """A value; `NO_DEFAULT` for an interpolation, and for one that has to be given elsewhere."""
    return NO_DEFAULT if isinstance(value, str) and ("${" in value or value == "???") else value


def _keywords(tree: ast.Module) -> dict[str, Any]:
    """The arguments of the one call of `GRPOConfig` in a script."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "GRPOConfig"]
    if len(named) > 1:
        raise InitError(f"--from: line {named[1].lineno} calls GRPOConfig again; leave one call in the script")
    return {word.arg or "**": _literal(word.value) for call in named for word in call.keywords}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return NO_DEFAULT


def _overrides(text: str) -> dict[str, Any]:
    """The overrides `key=value` of the one command in a launch script; the last one of a key wins, as in Hydra.

    A variable counts if it has one value: assigned once, not in a branch or loop, to a literal or a product of two.
    """
    text = _PRODUCT.sub(lambda found: str(int(found[1]) * int(found[2])), text)
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    if sum("verl.trainer.main" in word for word in words) > 1:
        raise InitError("--from: the script starts verl again; leave one command in it")
    assigned = _ASSIGNED.findall(text)
    times = Counter(name for _, name, _ in assigned)
    variables = {
        name: literal[0]
        for indent, name, value in assigned
        if not indent and times[name] == 1 and not re.search(r"[$`;&|()\\]", value)
        if len(literal := shlex.split(value, comments=True)) == 1
    }
    filled = [re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), word) for word in words]
    matches = filter(None, map(_OVERRIDE.fullmatch, filled))
    dotted = [f"{match[1]}={'???' if re.search('[$`]', match[2]) else match[2]}" for match in matches]
    return dict(OmegaConf.to_container(OmegaConf.from_dotlist(dotted)))  # type: ignore[arg-type]
