"""System calls missing in Python, each raising OSError: mounts, namespaces, capabilities, prctl."""

import ctypes
import os
import struct
from collections.abc import Iterable
from functools import partial
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4

_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_SETATTR = 442  # the same number on every architecture

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3 = 0x20080522
_PTHREAD_ATTRIBUTES_BYTES = 128  # more than pthread_attr_t has on any architecture
_libc = ctypes.CDLL(None, use_errno=True)
_with_interpreter_lock = ctypes.PyDLL(None, use_errno=True)
_BARE_FORK = _with_interpreter_lock.fork
_variables: dict[str, ctypes.Array[ctypes.c_char]] = {}
"""What `putenv` was given: the environment points there."""


def check(result: int, what: str) -> int:
    """`result`, or OSError with the calling thread's errno when it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def fork() -> int:
    """os.fork without the hooks that modules registered, for a process with a single thread.

    The hooks recreate locks that other threads might hold and write to hundreds of pages, each of which is then copied.
    The caller must seed random number generators.
    """
    return check(_BARE_FORK(), "fork")


def set_variable(name: str, value: str) -> None:
    """Set an environment variable of this process and its children, for Python and for C, often: nothing is kept.

    `os.environ` lets the C library keep every value that a variable ever had. Raises OSError.
    """
    key, content = os.fsencode(name), os.fsencode(value)
    there = ctypes.create_string_buffer(key + b"=" + content)
    check(_libc.putenv(there), f"putenv {name}")
    _variables[name] = there
    os.environ._data[key] = content  # type: ignore[attr-defined] # its own setter calls setenv


Step = partial[Any]
"""A prepared call, which touches little memory when it is made."""


def perform(steps: Iterable[Step]) -> None:
    """Make the calls in order. Raises OSError for the first that fails: as in Python, or with -1 and errno."""
    for step in steps:
        if step() == -1:
            number = ctypes.get_errno()
            raise OSError(number, f"{step.func.__name__}{step.args}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` (CLONE_NEW*); with CLONE_NEWPID the next child is in a new one."""
    check(_libc.unshare(flags), "unshare")


def enter_namespace(descriptor: int, kind: int) -> None:
    """Join the namespace of `kind` (CLONE_NEW*) of `descriptor`, a file of /proc/<pid>/ns."""
    check(_libc.setns(descriptor, kind), "setns")


def mounting(source: str, target: str, kind: str | None, flags: int, options: str = "") -> Step:
    """Return the step mount(2)."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    return partial(_libc.mount, *encoded[:3], ctypes.c_ulong(flags), encoded[3])


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    perform([mounting(source, target, kind, flags, options)])


def unmounting(target: str) -> Step:
    """Return the step that detaches `target` from this mount namespace; it disappears with its last user."""
    return partial(_libc.umount2, target.encode(), MNT_DETACH)


def restrict_mount(target: str, attributes: int, *, recursive: bool) -> None:
    """Add MOUNT_ATTR_* to the mount at `target`, and to those below it."""
    flags = _AT_RECURSIVE if recursive else 0
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    path = target.encode()
    result = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, flags, wanted, ctypes.c_size_t(len(wanted)))
    check(result, f"mount_setattr {target}")


def enter_root(directory: str) -> None:
    """Make the mount at `directory` the root; the old root is gone afterwards."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: number unknown on {os.uname().machine}")
    os.chdir(directory)
    # The new root is stacked on the old one at the same mount point, so that only the old one must be unmounted.
    check(_libc.syscall(number, b".", b"."), "pivot_root")
    perform([unmounting(".")])
    os.chdir("/")


def dropping_capabilities() -> Step:
    """Return the step that drops all capabilities."""
    return partial(_libc.capset, struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24))


def setting_dumpable(dumpable: bool) -> Step:
    """Return the step that sets whether processes of the same user may read the caller through /proc; forks
    inherit it.
    """
    return partial(_libc.prctl, PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)


def hide() -> None:
    """Keep other processes of the same user out of the caller's memory, environment and open files."""
    perform([setting_dumpable(False)])


def set_thread_stack(size: int) -> None:
    """Give threads that ask for no size of their own a stack of `size` bytes. Raises OSError."""
    attributes = ctypes.create_string_buffer(_PTHREAD_ATTRIBUTES_BYTES)
    for name, arguments in (
        ("pthread_attr_init", ()),
        ("pthread_attr_setstacksize", (ctypes.c_size_t(size),)),
        ("pthread_setattr_default_np", ()),
    ):
        if number := getattr(_libc, name)(attributes, *arguments):
            raise OSError(number, f"{name}: {os.strerror(number)}")


def dying_with_parent(signal_number: int) -> Step:
    """Return the step that requests `signal_number` at the end of the creating thread; check the parent afterwards."""
    return partial(_libc.prctl, PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def check_parent(parent: int) -> None:
    """Raises OSError if `parent` is already gone."""
    if os.getppid() != parent:
        raise OSError(f"the parent (pid {parent}) died while its child started")


def die_with_parent(parent: int, signal_number: int) -> None:
    """Request `signal_number` at the end of the creating thread. Raises OSError when `parent` is already gone."""
    perform([dying_with_parent(signal_number)])
    check_parent(parent)
