"""A snippet as the program `python main.py`: its module, its outputs, its limits of recursion, and how it ends."""

import atexit
import builtins
import errno
import importlib
import io
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from typing import Any

_FLUSH_FAILED = 120  # CPython's own code for it
_FILENAME = "main.py"
_FRAMES_OF_EXEC = 1
_MAX_RECURSION = 2**31 - 1


class _Output(io.FileIO):
    """One that drops what is beyond the size limit of a file: the reply would cut it anyway."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            return len(data)


def bound_outputs() -> None:
    """Give the calling process such a stdout and stderr, otherwise as the interpreter made them."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        made = getattr(sys, name)
        raw = _Output(number, "w", closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), made.encoding, made.errors, "\n", line_buffering=made.line_buffering
        )
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def explain_processes() -> None:
    """Say why multiprocessing fails, in place of a missing file of the C library's."""
    module: Any = importlib.import_module("_multiprocessing")

    class SemLock:
        SEM_VALUE_MAX = module.SemLock.SEM_VALUE_MAX

        def __init__(self, *_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, "one process per run: use threads instead of multiprocessing")

    module.SemLock = SemLock


def _frames() -> int:
    """How many there are below the caller's callee, the caller included."""
    frame, number = sys._getframe(1), 0
    while frame is not None:
        frame, number = frame.f_back, number + 1  # type: ignore[assignment]
    return number


def _hide_frames(number: int) -> None:
    """Count the recursion limit from the snippet's first frame, which has `number` of ours below it."""
    real_set, real_get = sys.setrecursionlimit, sys.getrecursionlimit

    def setrecursionlimit(limit: int, /) -> None:
        real_set(min(limit + number, _MAX_RECURSION) if isinstance(limit, int) and limit > 0 else limit)

    real_set(real_get() + number)
    sys.setrecursionlimit = setrecursionlimit
    sys.getrecursionlimit = lambda: real_get() - number


def run_main(source: bytes) -> int:
    """Be `python main.py`; the exit status."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=_FILENAME, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [_FILENAME]
    sys.path.insert(0, os.getcwd())
    lines = source.decode("utf-8", errors="replace").splitlines(keepends=True)
    linecache.cache[_FILENAME] = (len(source), None, lines, _FILENAME)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as the interpreter does at its start
    _hide_frames(_frames() + _FRAMES_OF_EXEC)
    try:
        exec(compile(source, _FILENAME, "exec", dont_inherit=True), main.__dict__)
        status = 0
    except SystemExit as request:
        status = _exit_status(request.code)
    except BaseException as error:
        status = _report(error)
        if isinstance(error, KeyboardInterrupt):
            _finish(status)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
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
