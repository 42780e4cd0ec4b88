"""Front doors of packages: what they import for type checkers only is imported when it is first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def import_when_used(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package (PEP 562) for the names that its `__init__` imports `if TYPE_CHECKING`.

    So these names stand in one place, and a process loads only the modules that it uses. package: `__name__` of a
    module that is being imported from a file.
    """
    file = sys.modules[package].__file__
    assert file is not None
    checked = (node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    modules = {
        alias.name: node.module
        for block in checked
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return get
