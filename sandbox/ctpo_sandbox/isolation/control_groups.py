"""Memory control groups, one for each worker and its runs: the kernel counts pages that they touch, not pages that they
map. Supports both versions. In version 1 our groups are inside the server's own group. In version 2 a group either
delegates memory or holds processes, so they are next to it; only the root group may do both, and there they are inside.
"""

import logging
import os
import time
from pathlib import Path
from typing import NamedTuple, Self

from ctpo_sandbox.errors import SandboxStartError
from ctpo_sandbox.temporary import note
from ctpo_sandbox.timeouts import GROUP_REMOVE_TIMEOUT_S

_log = logging.getLogger("ctpo_sandbox.isolation.control_groups")


def _refused(missing: str) -> SandboxStartError:
    return SandboxStartError(
        f"--address-space-mb (sandbox.address_space_mb) above the memory needs memory control groups: {missing}. "
        "Leave it out, or start the server where it may make them: as root, or in a scope of systemd"
    )


class _ControlFiles(NamedTuple):
    """Control files of a group: the limits of memory and swap, and the event counters."""

    limit: str
    swap: str
    no_swap: str  # "": no separate limit, memory and swap are counted together
    events: str


_V1 = _ControlFiles("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "", "memory.oom_control")
_V2 = _ControlFiles("memory.max", "memory.swap.max", "0", "memory.events")


class MemoryGroups:
    """`parent`: the group in which the calling process may create groups."""

    def __init__(self, parent: Path, files: _ControlFiles) -> None:
        self.parent, self._files = parent, files

    @classmethod
    def find(cls, process: Path = Path("/proc/self")) -> Self:
        """For `process`, a directory of /proc. Raises SandboxStartError."""
        own = own_group((process / "cgroup").read_text(), (process / "mountinfo").read_text())
        if own is None:
            raise _refused("none that holds the server is to be seen here")
        parent = own.path if own.files == _V1 else _parent(own)
        if not os.access(parent, os.W_OK):
            raise _refused(f"{parent} is not the server's to write to")
        if own.files == _V2:
            _delegate_memory(parent, may_change=parent == own.mount)
        return cls(parent, own.files)

    def group(self, name: str, megabytes: int) -> "MemoryGroup":
        """Return a new, empty group."""
        return MemoryGroup(self.parent / f"ctpo-sandbox-{os.getpid()}-{name}", self._files, megabytes << 20)


class MemoryGroup:
    """Processes that may use `limit` bytes together; they and what they fork stay in it."""

    def __init__(self, path: Path, files: _ControlFiles, limit: int) -> None:
        self._path, self._files, self._limit = path, files, limit
        self._kills = 0

    def enter(self, process: int) -> None:
        """Raises OSError."""
        note(self._path)
        self._path.mkdir(exist_ok=True)
        (self._path / self._files.limit).write_text(str(self._limit))
        if (self._path / self._files.swap).exists():
            (self._path / self._files.swap).write_text(self._files.no_swap or str(self._limit))
        (self._path / "cgroup.procs").write_text(str(process))
        self.was_exceeded()

    def was_exceeded(self) -> bool:
        """Return whether the kernel has killed a process for exceeding the limit since the last call."""
        counts = dict(line.split() for line in (self._path / self._files.events).read_text().splitlines())
        before, self._kills = self._kills, int(counts["oom_kill"])
        return self._kills > before

    def remove(self) -> None:
        """Remove it, once its processes are dead or dying. A failure is logged."""
        deadline = time.monotonic() + GROUP_REMOVE_TIMEOUT_S
        while self._path.exists():
            try:
                self._path.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    _log.error("control group %s is left behind: %s", self._path, error)
                    return
                time.sleep(0.01)  # its processes are dead in a moment


class OwnGroup(NamedTuple):
    """A process's own memory group, and the mount point of its hierarchy: nothing above that is visible."""

    path: Path
    mount: Path
    files: _ControlFiles


def own_group(groups: str, mounts: str) -> OwnGroup | None:
    """Return the memory group of a process, from its /proc files `cgroup` and `mountinfo`; None if it is not
    visible.
    """
    own = {names: path for _, names, path in (line.split(":", 2) for line in groups.splitlines())}
    mounted = [line.split() for line in mounts.splitlines()]
    for names, path in own.items():
        if "memory" in names.split(","):
            return _mounted(mounted, "cgroup", path, option="memory", files=_V1)
    return _mounted(mounted, "cgroup2", own[""], option="", files=_V2) if "" in own else None


def _mounted(mounts: list[list[str]], kind: str, path: str, *, option: str, files: _ControlFiles) -> OwnGroup | None:
    for fields in mounts:
        root, point, end = fields[3], fields[4], fields.index("-")
        if fields[end + 1] == kind and option in ["", *fields[end + 3].split(",")] and _is_below(path, root):
            return OwnGroup(Path(point, os.path.relpath(path, root)), Path(point), files)
    return None


def _parent(own: OwnGroup) -> Path:
    """The parent of our groups in version 2. Raises SandboxStartError where it would contain processes."""
    if own.path != own.mount:
        return own.path.parent
    if (own.path / "cgroup.type").exists():  # every group except the root has this file
        raise _refused(
            f"{own.path} is the topmost group of this container and holds the server, so it passes none on; move its "
            "processes into a group below it (docs/sandbox.md)"
        )
    return own.path


def _delegate_memory(parent: Path, *, may_change: bool) -> None:
    """Check that `parent` delegates memory. may_change: else enable it; in lower groups systemd would revert that."""
    delegated = parent / "cgroup.subtree_control"
    if not delegated.exists() or "memory" not in (parent / "cgroup.controllers").read_text().split():
        raise _refused(f"{parent} has no memory to pass on: its cgroup.controllers does not name it")
    if "memory" in delegated.read_text().split():
        return
    if not may_change:
        raise _refused(f"{delegated} does not name memory")
    try:
        delegated.write_text("+memory")
    except OSError as error:
        raise _refused(f"{delegated} does not take +memory: {error.strerror}") from error


def _is_below(path: str, root: str) -> bool:
    return ".." not in path.split("/") and (path == root or path.startswith(root.rstrip("/") + "/"))
