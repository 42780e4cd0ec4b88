"""Signatures read from a package's sources, which are never imported: that would need a GPU."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXISTS = "?"
"""In the place of a signature: the name is there, and its arguments are not in Python."""


@dataclass(frozen=True)
class Found:
    """A definition and the module that it is in."""

    node: ast.AST | None
    module: str


class Sources:
    """The modules below `root`, by dotted name."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module | None] = {}

    def signature(self, name: str) -> str | None:
        """The arguments of a call of `name`, without annotations and values; EXISTS, or None for no such name."""
        module, rest = self._split(name)
        if not rest:
            return EXISTS if self._tree(module) else None
        found = self._lookup(module, rest[0])
        for attribute in rest[1:]:
            if found is None or found.node is None:
                return None if found is None else EXISTS
            found = self._attribute(found, attribute)
        return None if found is None else self._arguments(found)

    def _split(self, name: str) -> tuple[str, list[str]]:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            if self._file(".".join(parts[:length])):
                return ".".join(parts[:length]), parts[length:]
        return parts[0], parts[1:]

    def _file(self, module: str) -> Path | None:
        path = self._root.joinpath(*module.split("."))
        candidates = (path / "__init__.py", path.with_suffix(".py"))
        return next((file for file in candidates if file.is_file()), None)

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            file = self._file(module)
            self._trees[module] = ast.parse(file.read_text(encoding="utf-8")) if file else None
        return self._trees[module]

    def _lookup(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Found | None:
        tree = self._tree(module)
        if (module, name) in seen:
            return None
        seen |= {(module, name)}
        if tree is None:
            return Found(None, module)  # another package: whether it has the name cannot be told
        for node in _statements(tree.body):
            match node:
                case ast.ClassDef(name=here) | ast.FunctionDef(name=here) | ast.AsyncFunctionDef(name=here) if (
                    here == name
                ):
                    return Found(node, module)
                case ast.Assign(targets=targets, value=value) if any(_is(target, name) for target in targets):
                    return self._assigned(module, value, seen)
                case ast.AnnAssign(target=target, value=value) if _is(target, name):
                    return self._assigned(module, value, seen)
                case ast.Import(names=names) if any((a.asname or a.name.split(".")[0]) == name for a in names):
                    return Found(None, name)
                case ast.ImportFrom(names=names):
                    source = self._absolute(module, node)
                    for alias in names:
                        if alias.name == "*" and self._tree(source) is not None:
                            if found := self._lookup(source, name, seen):
                                return found
                        elif (alias.asname or alias.name) == name:
                            inner = f"{source}.{alias.name}"
                            return Found(None, inner) if self._file(inner) else self._lookup(source, alias.name, seen)
        return Found(None, f"{module}.{name}") if self._file(f"{module}.{name}") else None

    def _assigned(self, module: str, value: ast.expr | None, seen: frozenset[tuple[str, str]]) -> Found | None:
        """What an assignment makes: another name of the same thing, an instance of a class, or a value."""
        match value:
            case ast.Name(id=other):
                return self._lookup(module, other, seen)
            case ast.Call(func=ast.Name(id=other)):
                made = self._lookup(module, other, seen)
                if made and isinstance(made.node, ast.ClassDef):
                    return self._attribute(made, "__call__") or Found(None, module)
        return Found(None, module)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self._file(module)
        parts = module.split(".")
        above = parts[: len(parts) - node.level + (file is not None and file.name == "__init__.py")]
        return ".".join([*above, *([node.module] if node.module else [])])

    def _attribute(self, found: Found, name: str) -> Found | None:
        """A method of a class or of one of its bases; a base from another package may have any."""
        if not isinstance(found.node, ast.ClassDef):
            return Found(None, found.module)
        for item in found.node.body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and item.name == name:
                return Found(item, found.module)
        if name == "__init__" and _is_dataclass(found.node):
            return found
        foreign = False
        for base in found.node.bases:
            owner = self._lookup(found.module, base.id) if isinstance(base, ast.Name) else None
            if owner is not None and isinstance(owner.node, ast.ClassDef):
                if inherited := self._attribute(owner, name):
                    return inherited
            else:
                foreign = True
        return Found(None, found.module) if foreign else None

    def _fields(self, found: Found) -> list[str]:
        """Of a dataclass, those that it inherits first."""
        assert isinstance(found.node, ast.ClassDef)
        bases = [self._lookup(found.module, base.id) for base in found.node.bases if isinstance(base, ast.Name)]
        inherited = [
            base for base in bases if base and isinstance(base.node, ast.ClassDef) and _is_dataclass(base.node)
        ]
        own = [item for item in found.node.body if isinstance(item, ast.AnnAssign)]
        words = [ast.unparse(item.target) + ("=..." if item.value else "") for item in own]
        return [word for base in inherited for word in self._fields(base)] + words

    def _arguments(self, found: Found) -> str:
        match found.node:
            case ast.ClassDef() as node if _is_dataclass(node):
                return f"({', '.join(self._fields(found))})"
            case ast.ClassDef():
                made = self._attribute(found, "__init__")
                return self._arguments(made) if made and made.node else EXISTS
            case (ast.FunctionDef() | ast.AsyncFunctionDef()) as node:
                arguments, decorators = node.args, node.decorator_list
                static = any(_is(decorator, "staticmethod") for decorator in decorators)
                first = arguments.args[0].arg if arguments.args else ""
                bound = first in ("self", "cls") and not static
                return _text(arguments, skip=int(bound))
        return EXISTS


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, also below `try` and `if`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.Try, ast.If)):
                yield from _statements(getattr(node, part, []))


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _text(arguments: ast.arguments, *, skip: int) -> str:
    """`(a, b=..., *rest, c=...)`"""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    words = [item.arg + ("=..." if index >= required else "") for index, item in enumerate(positional)][skip:]
    if arguments.vararg or arguments.kwonlyargs:
        words.append(f"*{arguments.vararg.arg}" if arguments.vararg else "*")
    words += [
        item.arg + ("=..." if default else "")
        for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return f"({', '.join([*words, *([f'**{arguments.kwarg.arg}'] if arguments.kwarg else [])])})"


def parsed(text: str) -> inspect.Signature:
    """The signature that `Sources.signature` wrote."""
    made: dict[str, Any] = {}
    exec(f"def function{text}: ...", made)
    return inspect.signature(made["function"])
