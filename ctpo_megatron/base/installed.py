"""What is installed, by its files. Nothing is imported, and a folder without code does not count.

`importlib.util.find_spec` alone takes what an uninstall left for a package (a namespace package), and any folder of
that name in the current directory. It also imports the parents of a dotted name.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

TE = "transformer_engine"
_SITES = ("site-packages", "dist-packages")
_TE_LIBRARIES = {
    "libtransformer_engine": "transformer-engine-cu13",
    "transformer_engine_torch": "transformer-engine-torch",
}
"""Beginning of a library's file name -> the distribution that brings it."""


def is_installed(module: str) -> bool:
    """Return whether a module, by its dotted name, has a file."""
    spec = _found(module)
    return spec is not None and spec.origin is not None


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution by its metadata; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions_of(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those that are installed."""
    return {name: version for name in distributions if (version := version_of(name)) is not None}


def install_command(*extras: str) -> str:
    """Return the command that brings extras of setup.py: to a checkout as an editable install, else to the installed
    wheel.
    """
    checkout, named = _checkout(), f"[{','.join(sorted(extras))}]"
    if checkout is None:
        return f"pip install {shlex.quote('ctpo-megatron' + named)}"
    return f"pip install -e {shlex.quote(f'{_from_here(checkout)}{named}')}"


SEPARATE = {"ctpo_answers": "answers", "ctpo_kernels": "kernels"}
"""Packages of distributions of their own, which no index has -> their folders in a checkout."""


def separate_command(package: str) -> str:
    """Return the command that brings a package of `SEPARATE`."""
    checkout = _checkout()
    source = f"{package}-*.whl" if checkout is None else shlex.quote(f"{_from_here(checkout)}/{SEPARATE[package]}")
    return f"pip install --no-deps {source}"


def _checkout() -> Path | None:
    """The checkout that this package is in; None for an installed wheel."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "setup.py").is_file() else None


def _from_here(folder: Path) -> str:
    return "." if folder == Path.cwd() else str(folder)


def left_over(module: str) -> list[Path]:
    """Installed folders with the name of a module and without its code; [] if its code is there."""
    spec = _found(module)
    if spec is None or spec.origin is not None:
        return []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    depth = module.count(".")
    return [folder for folder in folders if folder.parents[depth].name in _SITES]


class Trouble(NamedTuple):
    """What is wrong, and what mends it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.fix}"


def te_trouble() -> Trouble | None:
    """Return why `import transformer_engine` would fail; None if it would not, or if nothing of Transformer Engine is
    here.

    It needs two libraries, and all parts of one version (transformer-engine 2.11, `common/__init__.py`).
    """
    if folders := left_over(TE):
        fix = f"pip uninstall transformer-engine-cu13 transformer-engine-torch; rm -r {folders[0]}"
        return Trouble(f"{folders[0]} is what an uninstall left of Transformer Engine", fix)
    if not is_installed(TE):
        return None
    absent = [package for library, package in _TE_LIBRARIES.items() if not _te_library(library)]
    if not is_installed(f"{TE}.pytorch"):
        absent.insert(0, f"{TE}/pytorch")
    fix = "install all three parts in one version (docs/install_cuda.md), or none"
    if absent:
        return Trouble(f"Transformer Engine is here without {' and '.join(absent)}", fix)
    versions = _te_versions()
    if len(set(versions.values())) > 1:
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        return Trouble(f"the parts of Transformer Engine have different versions ({found})", fix)
    return None


def hide_broken_te() -> None:
    """Let imports of this process find no Transformer Engine where it is broken; call before megatron-core is imported.

    megatron-core takes any module of that name for it, and ends in PackageNotFoundError or FileNotFoundError.
    """
    if te_trouble():
        sys.modules[TE] = None  # type: ignore[assignment] # the documented way to make an import fail


def _found(module: str) -> ModuleSpec | None:
    name, *rest = module.split(".")
    hidden = name in sys.modules and sys.modules[name] is None  # `hide_broken_te`
    spec = PathFinder.find_spec(name) if hidden else importlib.util.find_spec(name)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name: with a dotted one the finder asks the parent, which would have to be imported.
        spec = PathFinder.find_spec(part, spec.submodule_search_locations)
    return spec


def _te_versions() -> dict[str, str]:
    from importlib.metadata import distributions  # here: every verb of `ctpo` imports this module

    names = ("transformer-engine", *_TE_LIBRARIES.values())
    return {package.name: package.version for name in names for package in distributions(name=name)}


def _te_library(prefix: str) -> bool:
    import sysconfig

    spec = _found(TE)
    roots = {Path(sysconfig.get_path("purelib"))}
    roots |= {Path(folder).parent for folder in (spec and spec.submodule_search_locations) or ()}
    folders = [root / below for root in roots for below in ("", TE, f"{TE}/wheel_lib")]
    return any(next(folder.glob(f"{prefix}*.so"), None) for folder in folders)
