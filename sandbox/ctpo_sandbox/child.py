"""The forked child: gives up its rights, then behaves like `python main.py` until it exits."""

import atexit
import builtins
import linecache
import os
import sys
import tempfile
import threading
import traceback
import types
from dataclasses import dataclass
from typing import NoReturn

from ctpo_sandbox.confine import Confinement
from ctpo_sandbox.libraries import reseed

SETUP_DONE = b"\0"
_SETUP_FD = 3
_WORKER_FILES = 256  # more than a worker ever has open
_SETUP_FAILED = 70
_REPORT_FAILED = 1
_FLUSH_FAILED = 120  # CPython's own code for it
_FILENAME = "main.py"


@dataclass(frozen=True)
class Files:
    """Descriptors of the four memory files of a run."""

    code: int
    stdin: int
    stdout: int
    stderr: int


def become_snippet(
    files: Files, *, directory: str, setup_pipe: int, confinement: Confinement, run_timeout_s: float, worker: int
) -> NoReturn:
    """Run the snippet in the calling process and never return.

    Writes `SETUP_DONE` to `setup_pipe` before the first line of the snippet, or why it could not get there.
    """
    report = setup_pipe
    try:
        source = _enter(files, directory)
        confinement.restrict_files(directory)
        report = _close_all_but(setup_pipe, max(_WORKER_FILES, confinement.limits.open_files))
        confinement.apply(run_timeout_s=run_timeout_s, worker=worker)
        reseed()
        os.write(report, SETUP_DONE)
        os.close(report)
    except BaseException:
        os.write(report, traceback.format_exc()[-4000:].encode())
        os._exit(_SETUP_FAILED)
    status = _REPORT_FAILED
    try:
        status = _run_main(source)
    finally:  # whatever happens: what called this function is the worker's code
        os._exit(status)


def _enter(files: Files, directory: str) -> bytes:
    os.setsid()
    source = os.pread(files.code, os.fstat(files.code).st_size, 0)
    for standard, descriptor in enumerate((files.stdin, files.stdout, files.stderr)):
        os.dup2(descriptor, standard)
    os.chdir(directory)
    os.environ.update(HOME=directory, TMPDIR=directory, PWD=directory)
    tempfile.tempdir = None
    return source


def _close_all_but(kept: int, limit: int) -> int:
    """Close every descriptor below `limit` except the standard ones and `kept`; its new number."""
    os.dup2(kept, _SETUP_FD)
    os.closerange(_SETUP_FD + 1, limit)
    return _SETUP_FD


def _run_main(source: bytes) -> int:
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=_FILENAME, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [_FILENAME]
    sys.path.insert(0, os.getcwd())
    lines = source.decode("utf-8", errors="replace").splitlines(keepends=True)
    linecache.cache[_FILENAME] = (len(source), None, lines, _FILENAME)
    try:
        exec(compile(source, _FILENAME, "exec", dont_inherit=True), main.__dict__)
        status = 0
    except SystemExit as request:
        status = _exit_status(request.code)
    except BaseException as error:
        status = _report(error)
    return _finish(status)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> int:
    own_frame_removed = error.__traceback__.tb_next if error.__traceback__ is not None else None
    error.__traceback__ = own_frame_removed
    try:
        if sys.excepthook is sys.__excepthook__:  # the C hook would look for main.py on disk
            traceback.print_exception(error)
        else:
            sys.excepthook(type(error), error, own_frame_removed)
    except BaseException as second:  # no memory left to format a traceback, a closed stderr, a broken hook
        os.write(2, f"{type(error).__name__} (its traceback could not be printed: {type(second).__name__})\n".encode())
    return 1


def _finish(status: int) -> int:
    """The steps of the interpreter's own shutdown that a snippet can observe."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException as error:
        os.write(2, f"{type(error).__name__} at exit: {error}\n".encode(errors="backslashreplace"))
        return status or _FLUSH_FAILED
    return status
