"""Finds users' parts, named `package.module:Name` in a configuration, wherever a process of the run needs them."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from ctpo_megatron.base.installed import SEPARATE
from ctpo_megatron.base.text import printable

_NOT_USERS = {"__main__", "__mp_main__", "ctpo_megatron", *SEPARATE, "ctpo_sandbox", "ctpo_launchers"}


class ExtensionError(Exception):
    """A user's part cannot be found or used; the message names it and says what to do."""


def activate(search_path: Iterable[str | Path]) -> None:
    """Let this process import from the folders of `extensions.path`, after everything that is installed."""
    for folder in (str(Path(entry).resolve()) for entry in search_path):
        if folder not in sys.path:
            sys.path.append(folder)


def load(name: str) -> Any:
    """Return the object that `package.module:Name` names; `activate` comes first. Raises ExtensionError."""
    module_name, separator, attribute = name.partition(":")
    if not (separator and module_name and attribute):
        raise ExtensionError(f"{name!r} is no import path; write package.module:Name")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ExtensionError(
                f"{name}: there is no module {error.name!r} in extensions.path or among the installed packages; "
                "add the folder of its file to extensions.path, or correct the name"
            ) from error
        raise ExtensionError(
            f"{name}: {module_name} needs a module that is missing: {error.name!r}; install it"
        ) from error
    except BaseException as error:  # a user's module may raise anything while it is imported
        if _from_outside(error) and not isinstance(error, SystemExit):  # which a script without a main guard raises
            raise
        raise ExtensionError(
            f"{name}: importing {module_name} failed: {shown(error)}; correct it until "
            f"`python -c 'import {module_name}'` passes in its folder"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, vars(found) if hasattr(found, "__dict__") else (), n=1)
            meant = f"did you mean {close[0]!r}?" if close else "define it there, or correct the name"
            raise ExtensionError(f"{name}: {module_name} has no {attribute!r}; {meant}")
        found = getattr(found, part)
    return found


def make(name: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return what is called for a name: an instance of a class made with the arguments, or a function with these bound.

    Raises ExtensionError, also for what the class raises.
    """
    found = load(name)
    if not isinstance(found, type):
        return partial(found, **arguments)
    try:
        made: Callable[..., Any] = found(**arguments)
    except BaseException as error:
        raise ExtensionError(f"{name} cannot be created: {shown(error)}") from error
    return made


def is_async(made: Callable[..., Any]) -> bool:
    """Return whether a call of what `make` returned is awaited."""
    inner = made.func if isinstance(made, partial) else made
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def loaded_files(search_path: Iterable[str | Path], paths: Collection[str]) -> dict[str, Path]:
    """Import the users' parts of these import paths; returns their source files by name in the search path.

    Raises ExtensionError when a part cannot be imported.
    """
    folders = [Path(folder).resolve() for folder in search_path]
    activate(folders)
    for path in paths:
        load(path)
    installed = {Path(entry).resolve() for entry in (*sys.path, sys.prefix, sys.base_prefix) if entry}
    inside, directory = tuple(os.path.join(folder, "") for folder in folders), cache(os.path.realpath)
    files = {}
    # Not only the named modules: what they import from these folders is users' code, too.
    for name, module in sorted(sys.modules.items()) if paths else ():
        if name.split(".")[0] in _NOT_USERS or not (claimed := getattr(module, "__file__", None)):
            continue
        parent, base = os.path.split(claimed)
        path = os.path.join(directory(parent), base)  # modules are thousands, their directories are few
        file = Path(os.path.realpath(path) if os.path.islink(path) else path)
        if not str(file).startswith(inside):
            continue
        folder = _folder_of(file, folders, installed)
        if folder and file.is_file():  # torch has modules that claim files which are nowhere
            files[str(file.relative_to(folder))] = file
    return files


def _folder_of(file: Path, folders: Collection[Path], installed: Collection[Path]) -> Path | None:
    """The folder of `extensions.path` that a module comes from; None if it is installed, even somewhere below."""
    nearest = next((parent for parent in file.parents if parent in folders or parent in installed), None)
    return nearest if nearest in folders else None


@contextmanager
def called(what: str) -> Iterator[None]:
    """Run users' code: what it raises that is no Exception becomes an ExtensionError that names `what`.

    Otherwise a CancelledError of an HTTP client would end our task, and a KeyboardInterrupt our event loop. What did
    not come from that code passes: cancellation of the current task, and what signal handlers raise in the main thread.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if _from_outside(error):
            raise
        raise ExtensionError(f"{what} raised {shown(error)}, which is no Exception") from error


def shown(error: BaseException) -> str:
    """Return class and message of an exception, on one line."""
    name, text = type(error).__name__, str(error)
    return printable(f"{name}: {text}" if text else name)


def _from_outside(error: BaseException) -> bool:
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs
            return False
        return task is not None and task.cancelling() > 0
    if threading.current_thread() is not threading.main_thread():
        return False
    ctrl_c = isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return ctrl_c or isinstance(error, SystemExit)


def use_problem(part: Any, seen: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """Return why a part cannot be called with what it sees, or ""; the arguments go to a class when it is created."""
    if not isinstance(part, type):
        return call_problem(part, seen, arguments) if callable(part) else "is neither a function nor a class"
    if not any("__call__" in vars(base) for base in part.__mro__):
        return f"is a class without __call__(self, {', '.join(seen)})"
    method = inspect.getattr_static(part, "__call__")
    return call_problem(part, (), arguments) or call_problem(method, ("self", *seen), {})


def call_problem(part: Callable[..., Any], positional: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """Return why `part(*positional, **arguments)` cannot be called, or ""."""
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):  # written in C without a signature: unknown
        return ""
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        call = ", ".join([*positional, *(f"{name}=..." for name in arguments)])
        return f"cannot be called with ({call}): {error}; its signature is {signature}"
    return ""
