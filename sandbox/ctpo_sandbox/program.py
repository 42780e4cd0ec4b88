"""A snippet as the program `python main.py`: its module, its outputs, its limits of recursion, and how it ends."""

import _signal  # type: ignore[import-not-found]  # without signal's tour through enumerations
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
_FRAMES_OF_RUN_MAIN = 2
_MAX_RECURSION = 2**31 - 1
_REHEARSALS = 2
_real_set, _real_get = sys.setrecursionlimit, sys.getrecursionlimit
_hidden = 0


class _Output(io.FileIO):
    """One that drops what is beyond the size limit of a file: the reply would cut it anyway."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            return len(data)


def prepare_main(*, explain: bool) -> None:
    """Do ahead, in the template, what every program needs: what a run does itself costs it a copy of each page touched.

    explain: have multiprocessing say why it fails, in place of a missing file of the C library's.
    """
    errors, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)  # streams look at what they are made over, which are regular files in a run
    _bound_outputs()
    os.dup2(errors, 2)
    os.close(errors)
    os.close(nothing)
    if explain:
        _explain_processes()
    sys.setrecursionlimit, sys.getrecursionlimit = _set_recursion_limit, _get_recursion_limit
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=_FILENAME, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [_FILENAME]
    for _ in range(_REHEARSALS):
        exec(compile(b"None", _FILENAME, "exec", dont_inherit=True), {})
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # not that of the template


def _bound_outputs() -> None:
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


def _explain_processes() -> None:
    module: Any = importlib.import_module("_multiprocessing")

    class SemLock:
        SEM_VALUE_MAX = module.SemLock.SEM_VALUE_MAX

        def __init__(self, *_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, "one process per run: use threads instead of multiprocessing")

    module.SemLock = SemLock


def _set_recursion_limit(limit: int, /) -> None:
    """Counted from the snippet's first frame."""
    _real_set(min(limit + _hidden, _MAX_RECURSION) if isinstance(limit, int) and limit > 0 else limit)


_set_recursion_limit.__name__ = _set_recursion_limit.__qualname__ = "setrecursionlimit"


def _get_recursion_limit() -> int:
    return _real_get() - _hidden


def frames() -> int:
    """How many there are below the caller, itself included."""
    frame, number = sys._getframe(1), 0
    while frame is not None:
        frame, number = frame.f_back, number + 1  # type: ignore[assignment]
    return number


def run_main(source: bytes, frames_below: int) -> int:
    """Be `python main.py`; the exit status. frames_below: those of the caller, itself included."""
    global _hidden
    sys.path.insert(0, os.getcwd())
    lines = source.decode("utf-8", errors="replace").splitlines(keepends=True)
    linecache.cache[_FILENAME] = (len(source), None, lines, _FILENAME)
    _signal.signal(_signal.SIGINT, signal.default_int_handler)  # as the interpreter does at its start
    threading.main_thread()._native_id = os.getpid()  # type: ignore[attr-defined]
    _hidden = frames_below + _FRAMES_OF_RUN_MAIN
    _real_set(_real_get() + _hidden)
    try:
        exec(compile(source, _FILENAME, "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
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
