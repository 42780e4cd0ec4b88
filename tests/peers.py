"""`python -m tests.peers`: compares names and defaults of TRL and verl with the tables of `config/peer_tables`.

The wheels are downloaded without their dependencies and read as archives: nothing is installed or imported. TRL's base
class is read from the transformers that is installed here. `--write` takes the defaults over into the tables.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ctpo_megatron.config.peers import NO_DEFAULT, PEER_TABLES, peer_table

_TRL = {
    "": (("trl/trainer/grpo_config.py", "GRPOConfig"), ("trl/trainer/base_config.py", "_BaseConfig")),
    "GRPOTrainer": (("trl/trainer/grpo_trainer.py", "GRPOTrainer"),),
    "AsyncGRPOConfig": (("trl/experimental/async_grpo/async_grpo_config.py", "AsyncGRPOConfig"),),
}
"""What a row is of -> the files and classes of the wheel."""
_VERL = {
    "": "verl/trainer/config/_generated_ppo_megatron_trainer.yaml",
    "ppo_trainer": "verl/trainer/config/_generated_ppo_trainer.yaml",
    "fully_async_ppo_megatron_trainer": (
        "verl/experimental/fully_async_policy/config/fully_async_ppo_megatron_trainer.yaml"
    ),
}
"""What a row is of -> the file of the wheel."""
ELSEWHERE = {"earlier", "later", "section", "DPPOConfig"}
"""What a row may be of besides these: names that the wheel's files do not have, and sections, which have no default."""
WIDTH = 120


def download(name: str, folder: Path) -> Path | None:
    """The wheel of the version that a table was read from; None where no index answers."""
    table = peer_table(name)
    wanted = f"{table.peer.lower()}=={table.read}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", wanted]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True)
    if done.returncode:
        print(f"{wanted}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return next(folder.glob(f"{name}-*.whl"))


def defaults(name: str, wheel: Path) -> dict[tuple[str, str], Any]:
    """(what a name is of, the name) -> its default in a wheel; `NO_DEFAULT`: it has none, or another key decides."""
    return dict(_of_trl(wheel) if name == "trl" else _of_verl(wheel))


def _of_trl(wheel: Path) -> Iterator[tuple[tuple[str, str], Any]]:
    yield from ((("", field), default) for field, default in _base().items())
    for of, files in _TRL.items():
        for file, class_name in reversed(files):
            text = zipfile.ZipFile(wheel).read(file).decode()
            yield from (((of, field), default) for field, default in _fields(text, class_name))


def _of_verl(wheel: Path) -> Iterator[tuple[tuple[str, str], Any]]:
    for of, file in _VERL.items():
        for key, value in _leaves(yaml.safe_load(zipfile.ZipFile(wheel).read(file))):
            unknown = isinstance(value, str) and ("${" in value or value == "???")
            yield (of, key.removeprefix("actor_rollout_ref.")), NO_DEFAULT if unknown else value


def _fields(text: str, class_name: str) -> Iterator[tuple[str, Any]]:
    """The fields of a data class, or the arguments of a class with `__init__`, with their defaults."""
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == class_name)
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, _default_of(node.value)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            names = [argument.arg for argument in node.args.args[1:]]
            given = [NO_DEFAULT] * (len(names) - len(node.args.defaults)) + [*map(_value, node.args.defaults)]
            yield from zip(names, given, strict=True)


def _default_of(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Call):
        node = next((word.value for word in node.keywords if word.arg == "default"), None)
    return NO_DEFAULT if node is None else _value(node)


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return NO_DEFAULT


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def differences(name: str, found: Mapping[tuple[str, str], Any]) -> Iterator[str]:
    """What the table of a trainer and its wheel say differently, a sentence each."""
    table = peer_table(name)
    for key in table.keys.values():
        place = (key.of, key.name)
        if key.of in ELSEWHERE:
            if ("", key.name) in found:
                yield f"{key.name}: {table.peer} {table.read} has it, but the row is of {key.of!r}"
        elif place not in found:
            yield f"{key.name}: {table.peer} {table.read} has no such name"
        elif found[place] != key.default:
            yield f"{key.name}: the default is {_shown(found[place])}, not {_shown(key.default)}"
    if name == "trl":
        own = {field for of, field in found if not of}.difference(_base(), table.keys)
        yield from (f"{field}: a field of GRPOConfig without a row" for field in sorted(own))


def _base() -> dict[str, Any]:
    """The fields of `TrainingArguments`, the base of GRPOConfig."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations is not None
    text = (Path(spec.submodule_search_locations[0]) / "training_args.py").read_text(encoding="utf-8")
    return dict(_fields(text, "TrainingArguments"))


def _shown(value: Any) -> str:
    return "none" if value is NO_DEFAULT else repr(value)


def text(name: str, found: Mapping[tuple[str, str], Any] | None = None) -> str:
    """A table as its file has it; with the defaults of a wheel, where they are given."""
    raw = yaml.safe_load((PEER_TABLES / f"{name}.yaml").read_text(encoding="utf-8"))
    lines = [_line(f"{field}: ", raw[field]) for field in ("peer", "read")] + ["keys:"]
    for key, row in raw["keys"].items():
        place = (row.get("of", ""), key)
        if found is not None and place in found:
            row = {word: value for word, value in row.items() if word != "default"}
            if found[place] is not NO_DEFAULT:
                row = {"default": found[place], **row}
        lines += _rows(key, row)
    return "\n".join(lines) + "\n"


def _rows(key: str, row: Mapping[str, Any]) -> Iterator[str]:
    """A row in one line, or where that is too long in one line for each of its words."""
    line = _line(f"  {key}: ", row)
    if len(line) <= WIDTH:
        yield line
        return
    yield f"  {key}:"
    for word, value in row.items():
        line = _line(f"    {word}: ", value)
        if len(line) <= WIDTH or not isinstance(value, dict):
            yield line
        else:
            yield f"    {word}:"
            yield from (_line(f"      {_flow(theirs)}: ", ours) for theirs, ours in value.items())


def _line(head: str, value: Any) -> str:
    return head + _flow(value)


def _flow(value: Any) -> str:
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return dumped.removesuffix("\n").removesuffix("\n...")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("--write", action="store_true", help="take names and defaults over into the tables")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="downloaded already")
    args = parser.parse_args()
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("trl", "verl"):
            wheel = next(args.wheels.glob(f"{name}-*.whl")) if args.wheels else download(name, Path(folder))
            if wheel is None:
                return 2
            found = defaults(name, wheel)
            if args.write:
                (PEER_TABLES / f"{name}.yaml").write_text(text(name, found), encoding="utf-8")
                peer_table.cache_clear()
            for sentence in differences(name, found):
                print(f"{name}: {sentence}")
                status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
