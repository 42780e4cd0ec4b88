"""Everything a child gives up before the snippet starts, in the order in which it must be given up."""

import ctypes
import math
import os
import resource
import signal
import struct
from typing import TYPE_CHECKING

from ctpo_sandbox.landlock import FileRules
from ctpo_sandbox.records import Limits

if TYPE_CHECKING:
    from ctpo_sandbox.syscalls import SnippetFilter

_MB = 1024 * 1024
_PR_SET_PDEATHSIG = 1
_CAPABILITY_VERSION_3 = 0x20080522
_CPU_SLACK_S = 1
_libc = ctypes.CDLL(None, use_errno=True)


def cpu_limit_s(run_timeout_s: float) -> int:
    """CPU seconds after which the kernel ends a child whose wall limit did not."""
    return math.ceil(run_timeout_s) + _CPU_SLACK_S


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _set_limits(limits: Limits, run_timeout_s: float) -> None:
    cpu = cpu_limit_s(run_timeout_s)
    hard = {
        resource.RLIMIT_AS: limits.memory_mb * _MB,
        resource.RLIMIT_FSIZE: limits.file_mb * _MB,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in hard.items():
        resource.setrlimit(kind, (value, value))
    # The soft limit raises SIGXCPU, which a snippet may ignore; the hard limit kills one second later.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def _die_with_parent(parent: int) -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise OSError(f"the worker (pid {parent}) died while its child started")


class Confinement:
    """What this machine lets a worker take away from its children.

    Built once in the worker. `missing` maps each protection that cannot be had to the reason.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.missing: dict[str, str] = {}
        self._filter = self._build_filter()
        self._files = self._build_file_rules()

    def _build_filter(self) -> "SnippetFilter | None":
        try:
            from ctpo_sandbox.syscalls import SnippetFilter

            snippet_filter = SnippetFilter()
        except (ImportError, RuntimeError, OSError) as error:  # pyseccomp raises RuntimeError without libseccomp
            self.missing["seccomp"] = str(error)
            return None
        if snippet_filter.unknown:
            self.missing["old libseccomp"] = "cannot filter " + ", ".join(snippet_filter.unknown)
        return snippet_filter

    def _build_file_rules(self) -> FileRules | None:
        try:
            return FileRules()
        except OSError as error:
            self.missing["landlock"] = str(error)
            return None

    def restrict_files(self, directory: str) -> None:
        """Take the file system below everything but `directory` away, while the rules' descriptors are still open."""
        if self._files is not None:
            self._files.restrict(directory)

    def apply(self, *, run_timeout_s: float, worker: int) -> None:
        """Confine the calling child, forked by the process `worker`, for good.

        Raises OSError when any step is refused: a child that is less confined than its worker promised must not run the
        snippet.
        """
        _set_limits(self.limits, run_timeout_s)
        _drop_capabilities()
        _die_with_parent(worker)
        if self._filter is not None:
            self._filter.load(os.getpid())
