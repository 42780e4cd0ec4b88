"""What programs may read of the machine: the interpreter, its packages and shared libraries, and a few files.

The folders around them are not among it: data and runs are kept there.
"""

import os
import sys
from functools import cache
from pathlib import Path

_LIBRARIES = ("lib", "lib32", "lib64", "share/zoneinfo", "share/terminfo")
FILES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/etc/ld.so.cache", "/etc/localtime")


def readable_trees() -> list[str]:
    """Folders of libraries, of the system and of the interpreter; not nested."""
    wanted = {"/sys/devices/system/cpu"}
    for prefix in ("/", "/usr", "/usr/local", sys.base_prefix, sys.prefix):
        wanted |= {os.path.join(prefix, name) for name in _LIBRARIES}
    chosen: list[str] = []
    for path in sorted(wanted):
        if os.path.isdir(path) and not _above(path, chosen):
            chosen.append(path)
    return chosen


def readable_files() -> list[str]:
    """Files outside of these folders: devices, what the C library reads, and the interpreter itself."""
    interpreter = {sys.executable, os.path.realpath(sys.executable)} if sys.executable else set()
    trees = readable_trees()
    return [path for path in (*FILES, *sorted(interpreter)) if os.path.exists(path) and not _above(path, trees)]


def readable_above(path: str | Path) -> str | None:
    """Return the folder that programs may read and that holds `path`, links followed; None where they cannot
    read it.
    """
    real = os.path.realpath(path)
    return next((tree for tree, links_followed in _real_trees() if _above(real, [links_followed])), None)


@cache
def _real_trees() -> list[tuple[str, str]]:
    """Each readable folder, and where it really is."""
    return [(tree, os.path.realpath(tree)) for tree in readable_trees()]


def _above(path: str, trees: list[str]) -> bool:
    return any(Path(path).is_relative_to(tree) for tree in trees)
