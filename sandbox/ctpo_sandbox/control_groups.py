"""Memory control groups, one for each worker and its runs: the kernel counts the pages that they touch, not those that
they map. Both versions; a group of ours is inside the server's own (version 1), or beside it (version 2, whose groups
hold either processes or groups).
"""

import contextlib
import logging
import os
import re
import time
from pathlib import Path
from typing import NamedTuple, Self

_PREFIX = "ctpo-sandbox-"
_REMOVE_TIMEOUT_S = 2.0
_POLL_S = 0.01
_log = logging.getLogger("ctpo_sandbox.control_groups")


class NoControlGroup(Exception):
    """The server may not make memory control groups; `missing` says why."""

    def __init__(self, missing: str) -> None:
        super().__init__(
            f"--address-space-mb (sandbox.address_space_mb) above the memory needs memory control groups: {missing}. "
            "Leave it out, or start the server where it may make them: as root, or in a scope of systemd"
        )


class _Files(NamedTuple):
    """Of a group: the limits of its memory and of its swap, and the counts of what happened."""

    limit: str
    swap: str
    no_swap: str  # "": the same as the limit, which then counts both
    events: str


_V1 = _Files("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "", "memory.oom_control")
_V2 = _Files("memory.max", "memory.swap.max", "0", "memory.events")


class MemoryGroups:
    """Where the calling process may make groups."""

    def __init__(self, parent: Path, files: _Files) -> None:
        self._parent, self._files = parent, files

    @classmethod
    def find(cls) -> Self:
        """Raises NoControlGroup."""
        found = place(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
        if found is None:
            raise NoControlGroup("no memory control groups are mounted here, or the server's is not below another one")
        parent, files = found
        passed_on = parent / "cgroup.subtree_control"
        if files == _V2 and "memory" not in (passed_on.read_text() if passed_on.exists() else "").split():
            raise NoControlGroup(f"{passed_on} does not name memory")
        if not os.access(parent, os.W_OK):
            raise NoControlGroup(f"{parent} is not the server's to write to")
        _remove_those_of_the_dead(parent)
        return cls(parent, files)

    def group(self, name: str, megabytes: int) -> "MemoryGroup":
        """One that nothing is in yet."""
        return MemoryGroup(self._parent / f"{_PREFIX}{os.getpid()}-{name}", self._files, megabytes << 20)


class MemoryGroup:
    """Processes that may use `limit` bytes together; they and what they fork stay in it."""

    def __init__(self, path: Path, files: _Files, limit: int) -> None:
        self._path, self._files, self._limit = path, files, limit
        self._kills = 0

    def enter(self, process: int) -> None:
        """Raises OSError."""
        self._path.mkdir(exist_ok=True)
        (self._path / self._files.limit).write_text(str(self._limit))
        if (self._path / self._files.swap).exists():
            (self._path / self._files.swap).write_text(self._files.no_swap or str(self._limit))
        (self._path / "cgroup.procs").write_text(str(process))
        self.was_exceeded()

    def was_exceeded(self) -> bool:
        """Whether the kernel has killed a process for it since the last call."""
        counts = dict(line.split() for line in (self._path / self._files.events).read_text().splitlines())
        before, self._kills = self._kills, int(counts["oom_kill"])
        return self._kills > before

    def remove(self) -> None:
        """When its processes are dead or dying. A failure is logged."""
        deadline = time.monotonic() + _REMOVE_TIMEOUT_S
        while self._path.exists():
            try:
                self._path.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    _log.error("control group %s is left behind: %s", self._path, error)
                    return
                time.sleep(_POLL_S)


def place(groups: str, mounts: str) -> tuple[Path, _Files] | None:
    """The directory for groups of the process whose /proc files `cgroup` and `mountinfo` say this; None for none."""
    own = {names: path for _, names, path in (line.split(":", 2) for line in groups.splitlines())}
    mounted = [line.split() for line in mounts.splitlines()]
    for names, path in own.items():
        if "memory" in names.split(","):
            top = _mounted(mounted, "cgroup", path, option="memory")
            return None if top is None else (top, _V1)
    top = _mounted(mounted, "cgroup2", own.get("", "/"), option="")
    # A mount shows nothing above its root.
    return None if top is None or str(top) in {fields[4] for fields in mounted} else (top.parent, _V2)


def _mounted(mounts: list[list[str]], kind: str, path: str, *, option: str) -> Path | None:
    """Where the group `path` of a hierarchy is to be seen."""
    for fields in mounts:
        root, point, end = fields[3], fields[4], fields.index("-")
        if fields[end + 1] == kind and option in ["", *fields[end + 3].split(",")] and _is_below(path, root):
            return Path(point, os.path.relpath(path, root))
    return None


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _remove_those_of_the_dead(parent: Path) -> None:
    """A server that was killed cannot remove its own."""
    for left in parent.glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", left.name)
        if owner and not Path("/proc", owner[1]).exists():
            with contextlib.suppress(OSError):  # its processes still end
                left.rmdir()
