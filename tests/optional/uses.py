"""What megatron-core asks of Transformer Engine and apex: names, and calls with their arguments, from its source."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

REACHED = (
    "extensions/transformer_engine.py",
    "extensions/transformer_engine_spec_provider.py",
    "distributed/param_and_grad_buffer.py",
    "fusions/fused_layer_norm.py",
    "models/backends.py",
    "models/common/embeddings/rope_utils.py",
    "models/gpt/gpt_layer_specs.py",
    "optimizer/__init__.py",
    "optimizer/clip_grads.py",
    "optimizer/distrib_optimizer.py",
    "optimizer/optimizer.py",
    "optimizer/optimizer_config.py",
    "tensor_parallel/layers.py",
    "tensor_parallel/random.py",
    "transformer/moe/experts.py",
    "transformer/moe/moe_utils.py",
    "transformer/moe/router.py",
    "transformer/transformer_block.py",
    "transformer/transformer_layer.py",
)
"""Files of megatron-core that run here and name one of the packages. Left out: FP8 and CUDA graphs of the trainer, not
offered by the configuration (`fp8_utils.py`, `transformer/cuda_graphs.py`)."""


@dataclass(frozen=True)
class Use:
    """One name, or one call of it: `arguments` by position, `keywords`; open: more that the source does not show."""

    name: str
    where: str
    arguments: int = -1
    keywords: tuple[str, ...] = ()
    open: bool = False


def megatron() -> Path:
    """The folder megatron/core, not imported."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "core"


def uses(package: str, version: str) -> Iterator[Use]:
    """Everything that the reached files ask of one package, in branches that its version takes."""
    for file in REACHED:
        reader = _Reader(package, Version(version), file)
        reader.visit(_tree(file))
        yield from reader.uses


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((megatron() / file).read_text(encoding="utf-8"))


@dataclass
class _Reader(ast.NodeVisitor):
    package: str
    version: Version
    file: str
    names: dict[str, str] = field(default_factory=dict)  # local name -> full name
    bases: dict[str, str] = field(default_factory=dict)  # class of this file -> the package's class it derives from
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    inside: list[ast.ClassDef | ast.FunctionDef] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)

    def visit_Module(self, node: ast.Module) -> None:
        self.functions = {item.name: item for item in ast.walk(node) if isinstance(item, ast.FunctionDef)}
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        taken = self._known(node.test)
        self.visit(node.test)
        for branch in ([node.body] if taken is not False else []) + ([node.orelse] if taken is not True else []):
            for item in branch:
                self.visit(item)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == self.package:
                self.names[alias.asname or self.package] = alias.name if alias.asname else self.package
                self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and node.module.split(".")[0] == self.package:
            for alias in node.names:
                self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self._add(f"{node.module}.{alias.name}", node)

    def visit_Assign(self, node: ast.Assign) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if name := self._full_name(value):
                self.names[target] = name
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            if name := self._full_name(base) or self.bases.get(getattr(base, "id", "")):
                self.bases[node.name] = name
        self._enter(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := self._full_name(node):
            self._add(name, node)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if name := self._called(node.func):
            words, is_open = self._keywords(node)
            count = sum(not isinstance(argument, ast.Starred) for argument in node.args)
            self._add(name, node, count, tuple(words), is_open or count < len(node.args))
        self.generic_visit(node)

    def _enter(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self.inside.append(node)
        self.generic_visit(node)
        self.inside.pop()

    def _add(self, name: str, node: ast.AST, *call: Any) -> None:
        self.uses.append(Use(name, f"{self.file}:{getattr(node, 'lineno', 0)}", *call))

    def _full_name(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._full_name(node.value)):
            return f"{owner}.{node.attr}"
        return None

    def _called(self, node: ast.expr) -> str | None:
        """A name of the package, or the method of its class behind `super().method` where that is the base."""
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=method):
                owner = next((item for item in reversed(self.inside) if isinstance(item, ast.ClassDef)), None)
                direct = owner is not None and any(self._full_name(base) for base in owner.bases)
                return f"{self.bases[owner.name]}.{method}" if owner is not None and direct else None
        return self._full_name(node)

    def _keywords(self, node: ast.Call) -> tuple[list[str], bool]:
        words = [keyword.arg for keyword in node.keywords if keyword.arg]
        is_open = False
        for keyword in node.keywords:
            if keyword.arg is None:
                more = self._keys(keyword.value, self._scope())
                words += more or []
                is_open |= more is None
        return sorted(set(words)), is_open

    def _scope(self) -> ast.FunctionDef | None:
        return next((item for item in reversed(self.inside) if isinstance(item, ast.FunctionDef)), None)

    def _keys(self, value: ast.expr, scope: ast.FunctionDef | None) -> list[str] | None:
        """Keys that a dictionary may have, as far as assignments and updates in the same function show them."""
        match value:
            case ast.Dict(keys=keys):
                return [key.value for key in keys if isinstance(key, ast.Constant)]
            case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
                return [keyword.arg for keyword in keywords if keyword.arg]
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                made = self.functions[name]
                returned = [item.value for item in ast.walk(made) if isinstance(item, ast.Return) and item.value]
                return [key for item in returned for key in self._keys(item, made) or []]
            case ast.Name(id=name) if scope is not None:
                found = [key for item in self._statements(scope) for key in self._stored(item, name, scope)]
                return found or None
        return None

    def _stored(self, item: ast.AST, name: str, scope: ast.FunctionDef) -> Iterator[str]:
        match item:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                yield from self._keys(value, None) or []
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                yield from self._keys(value, None) or []
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=target), slice=ast.Constant(value=key))]):
                yield from [str(key)] if target == name else []
            case ast.Call(func=ast.Attribute(value=ast.Name(id=target), attr="update"), args=[more]) if target == name:
                yield from self._keys(more, scope) or []

    def _statements(self, node: ast.AST) -> Iterator[ast.AST]:
        """All nodes below, without branches that the version does not take."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and (taken := self._known(child.test)) is not None:
                for item in child.body if taken else child.orelse:
                    yield item
                    yield from self._statements(item)
            else:
                yield child
                yield from self._statements(child)

    def _known(self, test: ast.expr) -> bool | None:
        """The value of a condition on the package's presence and version; None for others."""
        match test:
            case ast.Name(id="HAVE_TE" | "HAVE_APEX"):
                return True
            case ast.Name(id="USING_PYTORCH_OPTIMIZER"):
                return False
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                known = self._known(operand)
                return None if known is None else not known
            case ast.BoolOp(op=op, values=values):
                known_values = [self._known(value) for value in values]
                decisive = isinstance(op, ast.Or)
                if decisive in known_values:
                    return decisive
                return None if None in known_values else not decisive
            case ast.Call(func=ast.Name(id="is_te_min_version"), args=[ast.Constant(value=least)], keywords=keywords):
                if self.package != "transformer_engine":
                    return None
                strict = any(isinstance(k.value, ast.Constant) and k.value.value is False for k in keywords)
                return self.version > Version(str(least)) if strict else self.version >= Version(str(least))
        return None
