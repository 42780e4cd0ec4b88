"""What a file takes of vLLM: imports, reads and assignments of its names, read from the source and never imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

PUBLIC = (
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.engine.async_llm_engine",
    "vllm.inputs",
    "vllm.outputs",
    "vllm.logprobs",
    "vllm.sampling_params",
    "vllm.distributed.weight_transfer",
)
"""Modules of vLLM that its documents offer to users: settings, inputs, sampling parameters, outputs, weight updates."""
OPERATORS = ("torch.ops._C", "torch.ops._moe_C", "torch.ops.vllm")
"""Where vLLM registers its compiled operators."""


@dataclass(frozen=True, order=True)
class Use:
    """One name of vLLM, dotted. patch: assigned or deleted; the name is replaced in vLLM."""

    name: str
    line: int
    kind: Literal["import", "read", "patch"]


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def of_vllm(name: str) -> bool:
    return any(within(name, prefix) for prefix in ("vllm", *OPERATORS))


def is_private(name: str) -> bool:
    """A part begins with one underscore, or the module is not in `PUBLIC`."""
    hidden = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    return of_vllm(name) and (hidden or not any(within(name, module) for module in ("vllm.__version__", *PUBLIC)))


class Names:
    """Which dotted names the local names of a file stand for, in any function that imports or assigns them."""

    def __init__(self, tree: ast.AST) -> None:
        self._names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    self._names[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in ast.walk(tree):  # `factory: Any = async_llm.EngineCoreClient` is the class under another name
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                full = self.resolve(node.value)
                if full is not None and of_vllm(full):
                    self._names |= {target.id: full for target in targets if isinstance(target, ast.Name)}

    def resolve(self, node: ast.expr) -> str | None:
        """The dotted name of an expression; None for what is no plain name: a call, an element, an instance."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
            if node.func.id in ("getattr", "setattr", "delattr") and isinstance(node.args[1], ast.Constant):
                owner = self.resolve(node.args[0])
                return None if owner is None else f"{owner}.{node.args[1].value}"
            if node.func.id == "cast":
                return self.resolve(node.args[1])
        return None


def uses(text: str) -> list[Use]:
    """Every use of vLLM in the source of a file, in order of the names; of `a.b.c` the whole chain counts."""
    if not re.search(r"vllm|\bops\b", text):  # most files, and parsing them is what takes long
        return []
    tree = ast.parse(text)
    names = Names(tree)
    return sorted(set(_uses(tree, names)))


def _uses(tree: ast.AST, names: Names) -> Iterator[Use]:
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Use(alias.name, node.lineno, "import") for alias in node.names if of_vllm(alias.name))
        elif isinstance(node, ast.ImportFrom) and of_vllm(node.module or ""):
            yield from (Use(f"{node.module}.{alias.name}", node.lineno, "import") for alias in node.names)
        elif isinstance(node, ast.Attribute | ast.Call) and id(node) not in inner:
            full = names.resolve(node)
            if full is not None and of_vllm(full):
                yield Use(full, node.lineno, "patch" if _replaces(node) else "read")


def _replaces(node: ast.Attribute | ast.Call) -> bool:
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Store | ast.Del)
    return isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr")


def reached_privately(text: str) -> dict[str, int]:
    """Attributes with one leading underscore of anything but `self`, `cls` and imported names: of foreign objects."""
    tree = ast.parse(text)
    names, own = Names(tree), defined(tree)
    return {
        node.attr: node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if names.resolve(node) is None and not _is_self(node.value) and node.attr not in own
    }


def defined(tree: ast.AST) -> frozenset[str]:
    """Functions, fields of classes and attributes of `self` that a file defines."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {each.target.id for each in node.body if _is_field(each)}
            found |= {name.id for each in node.body if isinstance(each, ast.Assign) for name in each.targets}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return frozenset(found)


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
