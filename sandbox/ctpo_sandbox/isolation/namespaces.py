"""The box around the workers of a server: separate process ids, network and mounts, and a minimal root."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from ctpo_sandbox.isolation import libc
from ctpo_sandbox.isolation.readable import readable_files, readable_trees

WORK = "/work"
"""Parent of the mount point of each run's directory: Landlock checks parents of a mount point, not the mount itself."""

RUN = f"{WORK}/run"
_INSIDE = libc.CLONE_NEWNS | libc.CLONE_NEWIPC | libc.CLONE_NEWNET | libc.CLONE_NEWUTS
_QUIET = libc.MS_NOSUID | libc.MS_NODEV


def enter(root: str, *, user: bool, leave: Callable[[], None]) -> None:
    """Move the calling process into a box built on the empty directory `root`; returns in a child, as its process 1.

    user: create a user namespace first, as an unprivileged server must. The calling process waits for the child, calls
    `leave` and exits with the child's status. Raises OSError where the kernel or a container refuses a step.
    """
    identity = (os.geteuid(), os.getegid())
    libc.unshare(libc.CLONE_NEWPID | (libc.CLONE_NEWUSER if user else 0))
    if user:
        _map_identity(*identity)
    _continue_as_first_process(leave)
    libc.unshare(_INSIDE)  # in the child, so that its parent still sees the server's files and can `leave`
    _build(root)
    libc.enter_root(root)
    libc.restrict_mount("/", libc.MOUNT_ATTR_RDONLY, recursive=False)


def fork() -> int:
    """os.fork into a new pid namespace, with the child as process 1: workers cannot see each other's runs."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    child = -1
    libc.unshare(libc.CLONE_NEWPID)
    try:
        child = os.fork()
    finally:
        if child != 0:  # unshare works again only from the process's own namespace
            libc.enter_namespace(own, libc.CLONE_NEWPID)
        os.close(own)
    return child


def own_mounts() -> None:
    """Give the calling worker its own mounts: its runs' directories, and a /proc of its own process ids."""
    libc.unshare(libc.CLONE_NEWNS)
    libc.mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
    _mount_proc("/proc")


def _map_identity(uid: int, gid: int) -> None:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _continue_as_first_process(leave: Callable[[], None]) -> None:
    libc.hide()  # both processes; before, the user's ids could not be mapped
    child = os.fork()
    if child == 0:
        return
    # Only the child may hold the server's socket open.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, status = os.waitpid(child, 0)
    leave()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _build(root: str) -> None:
    libc.mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
    libc.mount("tmpfs", root, "tmpfs", _QUIET, "mode=0755,size=1m")
    os.umask(0o022)
    for path in readable_trees():
        inside = root + path
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
        else:
            os.makedirs(inside, exist_ok=True)
            _bind(path, inside)
    for path in readable_files():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        with open(root + path, "w"):
            pass
        _bind(path, root + path)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
    os.makedirs(root + RUN)
    if not os.path.exists(root + "/tmp"):  # it exists if the interpreter is below it
        os.symlink(RUN, root + "/tmp")
    os.makedirs(root + "/proc")
    _mount_proc(root + "/proc")


def _mount_proc(target: str) -> None:
    libc.mount("proc", target, "proc", _QUIET | libc.MS_NOEXEC)
    libc.restrict_mount(target, libc.MOUNT_ATTR_RDONLY, recursive=False)


def _bind(source: str, target: str) -> None:
    libc.mount(source, target, None, libc.MS_BIND | libc.MS_REC)
    libc.restrict_mount(target, libc.MOUNT_ATTR_RDONLY | libc.MOUNT_ATTR_NOSUID, recursive=True)


class RunMount:
    """A run's own file system: empty, limited in bytes and files, and removed with the run."""

    path = RUN

    def __init__(self, *, megabytes: int, files: int, owner: int | None) -> None:
        owned = "" if owner is None else f",uid={owner},gid={owner}"
        options = f"mode=0700,size={megabytes}m,nr_inodes={files}{owned}"
        self._mount = (libc.mounting("tmpfs", RUN, "tmpfs", _QUIET, options),)
        self._unmount = (libc.unmounting(RUN),)

    def make(self) -> None:
        """Mount it."""
        libc.perform(self._mount)

    def excess(self, child: int, outputs: Sequence[int]) -> str:
        """Return whether the kernel enforces the limits."""
        return ""

    def excess_left(self) -> str:
        """Return whether the kernel has enforced the limits."""
        return ""

    def discard_quickly(self) -> bool:
        """Always quick: memory is freed, not files one by one."""
        libc.perform(self._unmount)
        return True

    def discard(self) -> None:
        """Nothing remains to be done."""

    def close(self) -> None:
        """Nothing remains outside the box."""
