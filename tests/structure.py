"""Figures to steer by: python -m tests.structure [ROOT]. They are a compass and no test: never write for a number.

Works on any checkout of the repository; packages below the four product folders may have any names. With `--trace` it
runs one step of the small quickstart of this checkout, a minute, and lists the files that a row and a weight enter.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

from tests.prose.__main__ import ROOT, count, of_markdown, sentences
from tests.walk import Walks, merged, trace

CORE = "ctpo_megatron"
PRODUCT = (CORE, "answers/ctpo_answers", "kernels/ctpo_kernels", "sandbox/ctpo_sandbox", "launchers/ctpo_launchers")
GENERATED = tuple(
    f"docs/reference/{page}.md"
    for page in ("answers", "command_line", "configuration", "kernels", "launchers", "sandbox", "sizing")
)
LOOP = ("train.py", "reinforce")
ARGUMENTS, WORDS = 6, 30
"""Most arguments of a constructor; most words of a sentence."""

TIME = re.compile(r"(^|_)(S|SECONDS|RETRIES|ATTEMPTS|TRIES|RESTARTS|BACKOFF|TIMEOUT|DEADLINE|GRACE|WAIT|POLL)(_|$)")
"""In the name of a constant of seconds or retries."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
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

    @cached_property
    def comments(self) -> int:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(token.type == tokenize.COMMENT for token in tokens)

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


def bases(node: ast.ClassDef) -> list[str]:
    """Last names of the bases: `a.B[T]` is B."""
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [ast.unparse(base).rpartition(".")[2] for base in plain]


def exceptions(found: Iterable[Module]) -> list[str]:
    """Classes that inherit, perhaps through each other, from a class named as exceptions are."""
    of = {node.name: bases(node) for node in classes(found)}

    def raised(name: str, seen: frozenset[str] = frozenset()) -> bool:
        if name not in of or name in seen:
            return name.endswith(("Error", "Exception", "Exit", "Interrupt"))
        return any(raised(base, seen | {name}) for base in of[name])

    return [node.name for node in classes(found) if raised(node.name)]


def public_names(found: Iterable[Module]) -> int:
    """Function, classes, methods and constants whose names do not begin with an underscore."""
    return sum(not name.startswith("_") for module in found for name in _defined(module.tree.body))


def _defined(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (each.name for each in node.body if isinstance(each, Function))


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [name.id for name in names if isinstance(name, ast.Name) and name.id != "__all__"]


def takes_config(node: Function) -> bool:
    """Whether a parameter is the whole `Config`, perhaps optional."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return any(each.annotation and re.search(r"\bConfig\b", ast.unparse(each.annotation)) for each in arguments)


def constructors(found: Iterable[Module]) -> list[str]:
    """Classes with an `__init__` of more arguments than `ARGUMENTS`, without self."""
    return [each.name for each in classes(found) for part in each.body if _long_init(part)]


def _long_init(node: ast.stmt) -> bool:
    if not isinstance(node, Function) or node.name != "__init__":
        return False
    return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1 > ARGUMENTS


def constants_of_time(found: Sequence[Module]) -> list[str]:
    """Constants of modules and classes with a name of seconds, retries or backoff."""
    bodies = [module.tree.body for module in found] + [node.body for node in classes(found)]
    names = (name for body in bodies for statement in body for name in _assigned(statement))
    return [name for name in names if name.isupper() and TIME.search(name)]


def twice(found: Iterable[Module]) -> list[str]:
    return sorted(name for name, n in Counter(node.name for node in classes(found)).items() if n > 1)


def names_in_loop(found: Iterable[Module]) -> int:
    """Distinct names and attributes in the loop; 0: it is not there."""
    file, function = LOOP
    loops = [node for module in found if module.path.name == file for node in module.functions]
    inside = [part for node in loops if node.name == function for part in ast.walk(node)]
    names = {part.id for part in inside if isinstance(part, ast.Name)}
    return len(names | {part.attr for part in inside if isinstance(part, ast.Attribute)})


def per(amount: int, lines: int, unit: int) -> str:
    return f"{amount / max(1, lines) * unit:.1f}"


def comprehensions(found: Sequence[Module]) -> tuple[str, int]:
    """Per 1,000 lines, and those with more than one `for`."""
    loops = [node.generators for module in found for node in module.nodes if isinstance(node, COMPREHENSIONS)]
    return per(len(loops), total(found), 1000), sum(len(each) > 1 for each in loops)


def comments(found: Sequence[Module]) -> str:
    return per(sum(module.comments for module in found), total(found), 100)


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
    pages = [*documents, root / "README.md", root / "CONTRIBUTING.md"]
    prose = (text for page in pages if page.exists() for text in of_markdown("", page.read_text(encoding="utf-8")))
    lengths = [count(sentence) for text in prose for sentence in sentences(text.words)]
    takers = [node for module in core for node in module.functions if takes_config(node)]
    amount, nested = comprehensions(core)
    return [
        ("core (ctpo_megatron)", size(core)),
        ("all product packages", size(every)),
        ("Protocols", str(sum("Protocol" in bases(node) for node in classes(every)))),
        ("exception classes", str(len(exceptions(every)))),
        ("public names", f"{public_names(every):,} (core {public_names(core):,})"),
        ("functions of the core that take the whole Config", str(len(takers))),
        ("class names defined twice", f"{len(twice(every))}: {', '.join(twice(every))}"),
        ("constants of seconds and retries", str(len(constants_of_time(every)))),
        (f"names in {LOOP[1]}() of {LOOP[0]}", str(names_in_loop(core))),
        (f"constructors of more than {ARGUMENTS} arguments", _listed(constructors(every))),
        ("comprehensions per 1,000 lines of the core", f"{amount}; {nested} with more than one `for`"),
        ("comments per 100 lines of the core", comments(core)),
        *((f"  {folder}", comments(found)) for folder, found in packages(root).items()),
        ("tests", size(modules(root / "tests"))),
        ("answers/tests", size(modules(root / "answers/tests"))),
        ("words of README", f"{words([root / 'README.md']):,}"),
        ("words of docs without the reference", f"{words(explained):,}"),
        (f"sentences of documents over {WORDS} words", f"{sum(n > WORDS for n in lengths)} of {len(lengths):,}"),
    ]


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(names)}"


def packages(root: Path) -> dict[str, list[Module]]:
    """The packages directly below the core, and the other product folders."""
    inside = [path.parent for path in sorted((root / CORE).glob("*/__init__.py"))]
    folders = [*inside, *(root / folder for folder in PRODUCT[1:])]
    return {str(folder.relative_to(root)): modules(folder) for folder in folders if folder.exists()}


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
