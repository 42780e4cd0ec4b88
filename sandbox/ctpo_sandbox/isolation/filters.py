"""Compiled seccomp filters. They are compiled in a separate, short-lived process: libseccomp and the imports of its
binding would be a quarter of the page tables that every fork of a template copies.
"""

import ctypes
import os
import struct
import sys
import traceback
from functools import partial

from ctpo_sandbox.isolation.libc import Step, perform

ANY_PID = 0x7ABCDE5F
"""Placeholder for the child's process id in a compiled filter."""

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
_SECCOMP_MODE_FILTER = 2
_OPERAND = struct.Struct("=I")
_INSTRUCTION = 8
_FAILED = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class _Filter:
    """A compiled filter, ready to be loaded."""

    def __init__(self, code: bytes) -> None:
        self.code = ctypes.create_string_buffer(code, len(code))
        self._program = ctypes.byref(_Program(len(code) // _INSTRUCTION, ctypes.addressof(self.code)))

    def loading(self) -> Step:
        """Return the step that loads the filter into the calling process, irreversibly; fails without no_new_privs."""
        return partial(_libc.prctl, PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._program, 0, 0)


class WorkerFilter(_Filter):
    """The allow-list of a worker and its children."""

    def load(self) -> None:
        """Load the filter into the calling worker, irreversibly, with no_new_privs; its children inherit both."""
        perform([partial(_libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), self.loading()])


class ChildFilter(_Filter):
    """Further restrictions of a child; to be loaded after `allow_self`."""

    def __init__(self, code: bytes) -> None:
        super().__init__(code)
        # The operand is the second half of an instruction.
        self._pids = [at for at in range(4, len(code), _INSTRUCTION) if _OPERAND.unpack_from(code, at) == (ANY_PID,)]
        if not self._pids:
            raise RuntimeError("the compiled seccomp filter does not compare process ids")

    def allow_self(self) -> None:
        """Allow signals to the calling process only."""
        for at in self._pids:
            _OPERAND.pack_into(self.code, at, os.getpid())


def compiled(*, file_attributes: bool, binding: str | None = None) -> tuple[ChildFilter, WorkerFilter]:
    """Both filters; file_attributes: see `syscalls.child_rules`. Raises RuntimeError without libseccomp.

    binding: folder of pyseccomp, which this interpreter may not find, and snippets must not.
    """
    files = [os.memfd_create("filter") for _ in range(2)]
    try:
        compiler = os.fork()
        if compiler == 0:
            sys.path += filter(None, [binding])
            _compile(files, file_attributes=file_attributes)
        _, status = os.waitpid(compiler, 0)
        codes = [os.pread(file, os.fstat(file).st_size, 0) for file in files]
    finally:
        for file in files:
            os.close(file)
    if status != 0:
        raise RuntimeError(codes[0].decode(errors="replace") or f"compiling the filters ended with {status}")
    return ChildFilter(codes[0]), WorkerFilter(codes[1])


def _compile(files: list[int], *, file_attributes: bool) -> None:
    """In the forked process: write both filters to `files`, or the error to the first."""
    status = _FAILED
    try:
        from ctpo_sandbox.isolation.syscalls import child_rules, worker_rules

        for file, rules in zip(files, (child_rules(file_attributes=file_attributes), worker_rules()), strict=True):
            with open(file, "wb", closefd=False) as stream:
                rules.export_bpf(stream)
        status = 0
    except BaseException as error:  # never return: the caller is the template's code
        os.ftruncate(files[0], 0)
        os.pwrite(files[0], traceback.format_exception_only(error)[-1].strip().encode(), 0)
    finally:
        os._exit(status)
