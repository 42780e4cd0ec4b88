"""Figures to steer by: python -m tests.structure [ROOT]. They are a compass and no test: never write for a number.

Works on any checkout of the repository; packages below the four product folders may have any names. With `--trace` it
runs one step of the small quickstart of this checkout, a minute, and lists the files that a row and a weight enter.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

from tests.prose.__main__ import ROOT
from tests.walk import Walks, merged, trace

CORE = "ctpo_megatron"
PRODUCT = (CORE, "answers/ctpo_answers", "kernels/ctpo_kernels", "sandbox/ctpo_sandbox", "launchers/ctpo_launchers")
GENERATED = tuple(
    f"docs/reference/{page}.md"
    for page in ("answers", "command_line", "configuration", "kernels", "launchers", "metrics", "sandbox", "sizing")
)
TIME = re.compile(r"(^|_)(S|SECONDS|RETRIES|ATTEMPTS|TRIES|RESTARTS|BACKOFF|TIMEOUT|DEADLINE|GRACE|WAIT|POLL)(_|$)")
"""In the name of a constant of seconds or retries."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Row = tuple[str, str]
T = TypeVar("T", bound=ast.AST)


@dataclass(frozen=True)
class Module:
    """One file of Python."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def of(self, *kinds: type[T]) -> list[T]:
        return [node for node in self.nodes if isinstance(node, kinds)]

    @property
    def functions(self) -> list[Function]:
        return [*self.of(ast.FunctionDef), *self.of(ast.AsyncFunctionDef)]


@cache
def module(path: Path) -> Module:
    """A file that does not change while the process lives: read and parsed once."""
    return Module(path, path.read_text(encoding="utf-8"))


def modules(folder: Path) -> list[Module]:
    return [module(path) for path in sorted(folder.rglob("*.py"))]


def classes(found: Iterable[Module]) -> list[ast.ClassDef]:
    return [node for module in found for node in module.of(ast.ClassDef)]


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [name.id for name in names if isinstance(name, ast.Name) and name.id != "__all__"]


def takes_config(node: Function) -> bool:
    """Whether a parameter is the whole `Config`, perhaps optional."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return any(each.annotation and re.search(r"\bConfig\b", ast.unparse(each.annotation)) for each in arguments)


def constants_of_time(found: Sequence[Module]) -> list[str]:
    """Constants of modules and classes with a name of seconds, retries or backoff."""
    bodies = [module.tree.body for module in found] + [node.body for node in classes(found)]
    names = (name for body in bodies for statement in body for name in _assigned(statement))
    return [name for name in names if name.isupper() and TIME.search(name)]


def total(found: Iterable[Module]) -> int:
    return sum(module.lines for module in found)


def size(found: Sequence[Module]) -> str:
    return f"{total(found):,} lines in {len(found)} files"


def words(paths: Iterable[Path]) -> int:
    """Words with a letter or a digit: not the bars of tables, nor signs of formulas."""
    texts = (path.read_text(encoding="utf-8") for path in paths if path.exists())
    return sum(any(map(str.isalnum, word)) for text in texts for word in text.split())


def figures(root: Path) -> list[Row]:
    """The rows of the table."""
    core = modules(root / CORE)
    every = [module for folder in PRODUCT for module in modules(root / folder)]
    documents = [path for path in sorted(root.glob("docs/**/*.md")) if str(path.relative_to(root)) not in GENERATED]
    explained = [path for path in documents if path.parent != root / "docs" / "reference"]
    takers = [node for module in core for node in module.functions if takes_config(node)]
    return [
        ("core (ctpo_megatron)", size(core)),
        ("all product packages", size(every)),
        ("functions of the core that take the whole Config", str(len(takers))),
        ("constants of seconds and retries", str(len(constants_of_time(every)))),
        ("tests", size(modules(root / "tests"))),
        ("answers/tests", size(modules(root / "answers/tests"))),
        ("words of README", f"{words([root / 'README.md']):,}"),
        ("words of docs without the reference", f"{words(explained):,}"),
    ]


def traced(root: Path) -> Walks:
    """What a row and a weight enter in one step. Raises RuntimeError and ValueError as `tests.walk`."""
    with tempfile.TemporaryDirectory(prefix="ctpo_walk_") as folder:
        trace(Path(folder), [root / package for package in PRODUCT])
        return merged(Path(folder), root)


def listing(root: Path, name: str, files: Iterable[str]) -> list[str]:
    """The sum, and under each product package its own and its files, with their lines."""
    found = {file: module(root / file) for file in files}
    lines = [f"{name}: {_sum(found.values())}"]
    for package in PRODUCT:
        inside = {file: each for file, each in found.items() if Path(file).is_relative_to(package)}
        lines += [f"  {package}: {_sum(inside.values())}"] if inside else []
        lines += [f"  {each.lines:>7,}  {file}" for file, each in inside.items()]
    return lines


def _sum(found: Collection[Module]) -> str:
    return f"{len(found)} files, {total(found):,} lines"


def as_json(root: Path, walks: Walks) -> str:
    """Of each walk: the number of files and of lines, and of each file its lines and the functions that were called."""
    lines = {file: module(root / file).lines for files in walks.values() for file in files}
    return json.dumps(
        {
            name: {
                "files": len(files),
                "lines": sum(lines[file] for file in files),
                "entered": {file: {"lines": lines[file], "functions": called} for file, called in files.items()},
            }
            for name, files in walks.items()
        },
        indent=1,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, help="a checkout; default: this one")
    parser.add_argument("--trace", action="store_true", help="list the files that a row and a weight enter in one step")
    parser.add_argument("--json", action="store_true", help="the lists as JSON, with the functions that were called")
    arguments = parser.parse_args(argv)
    if arguments.trace and arguments.root:
        parser.error("--trace runs this checkout: call it from the other one")
    if arguments.json and not arguments.trace:
        parser.error("--json is a form of the lists: add --trace")
    if arguments.trace:
        walks = traced(ROOT)
        lists = [line for name, files in walks.items() for line in listing(ROOT, name, files)]
        print(as_json(ROOT, walks) if arguments.json else "\n".join(lists))
        return 0
    rows = figures(arguments.root or ROOT)
    width = max(len(name) for name, _ in rows)
    print(*(f"{name:<{width}}  {value}" for name, value in rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
