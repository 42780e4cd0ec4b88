"""Runs a snippet like `python -u main.py`: module, outputs, recursion limit, and shutdown."""

import _signal  # type: ignore[import-not-found]  # without the enums of signal
import _thread
import atexit
import builtins
import errno
import io
import linecache
import logging
import os
import signal
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from ctpo_sandbox.isolation.libc import Step

REHEARSALS = 20
"""Calls after which Python 3.11 has specialized a function's bytecode, which then touches fewer objects."""

_FLUSH_FAILED = 120  # CPython's own exit status for it
_FILENAME = "main.py"
_FRAMES_OF_RUN_MAIN = 1  # once specialized; before, Python 3.11 also counts its call of `exec`
_MAX_RECURSION = 2**31 - 1
_real_set, _real_get = sys.setrecursionlimit, sys.getrecursionlimit
_hidden = 0
_write = io.FileIO.write
_STREAMS = ((1, "stdout"), (2, "stderr"))
_exits: list[object] = []
_handlers: list[object] = []


class _Output(io.FileIO):
    """An output that drops everything beyond the file size limit, which the reply would cut anyway."""

    def write(self, data: Any) -> int:
        try:
            return _write(self, data)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            return len(data)


def prepare_main() -> None:
    """Prepare in the template what every program needs: in a run it would cost a copy of each touched page."""
    errors, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)  # streams inspect their files, which are regular files in a run
    _rehearse([_output(number, name) for number, name in _STREAMS])
    for number, name in _STREAMS:
        stream = _output(number, name)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.dup2(errors, 2)
    os.close(errors)
    os.close(nothing)
    sys.setrecursionlimit, sys.getrecursionlimit = _set_recursion_limit, _get_recursion_limit
    sys.set_int_max_str_digits(0)  # a guard of servers against long texts; here the run's time is limited
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=_FILENAME, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [_FILENAME]
    _forget_exits()
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # not the template's directory


def _output(number: int, name: str) -> io.TextIOWrapper:
    """Such a stdout or stderr, otherwise as the interpreter creates it with -u.

    Nothing is kept back: what is in a buffer when a limit ends the program would be lost.
    """
    made = getattr(sys, name)
    raw = _Output(number, "w", closefd=False)
    raw.name = f"<{name}>"
    stream = io.TextIOWrapper(raw, made.encoding, made.errors, "\n", write_through=True)
    stream.mode = "w"  # type: ignore[misc]
    return stream


def _rehearse(streams: list[io.TextIOWrapper]) -> None:
    for _ in range(REHEARSALS):
        run_main(b"for stream in streams: print(1 + 1, file=stream)", {"streams": streams})
        _registered()
        _flush(streams)
    del linecache.cache[_FILENAME]


def _forget_exits() -> None:
    """Unregister the exit handlers of the template's modules; `finish` runs those that have something to do."""
    atexit.unregister(logging.shutdown)
    atexit.unregister(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # the next finalizer registers it again
    _exits[:] = _registered()
    _handlers[:] = logging._handlerList  # type: ignore[attr-defined]


def _registered() -> list[object]:
    """What `threading._shutdown` and exit handlers have to wait for."""
    return [_thread._count(), atexit._ncallbacks(), *threading._threading_atexits]  # type: ignore[attr-defined]


def _set_recursion_limit(limit: int, /) -> None:
    """As sys.setrecursionlimit, counted from the snippet's first frame."""
    _real_set(min(limit + _hidden, _MAX_RECURSION) if isinstance(limit, int) and limit > 0 else limit)


_set_recursion_limit.__name__ = _set_recursion_limit.__qualname__ = "setrecursionlimit"


def _get_recursion_limit() -> int:
    return _real_get() - _hidden


def frames() -> int:
    """Number of frames up to and including the caller's."""
    frame, number = sys._getframe(1), 0
    while frame is not None:
        frame, number = frame.f_back, number + 1  # type: ignore[assignment]
    return number


def hide_frames(below: int) -> None:
    """Count the recursion limit from the first frame of a snippet, with `below` frames under `run_main`."""
    global _hidden
    limit = _get_recursion_limit()
    _hidden = below + _FRAMES_OF_RUN_MAIN
    _real_set(limit + _hidden)


def interrupting() -> Step:
    """Return the step of a run that handles SIGINT as an interpreter does at its start."""
    return partial(_signal.signal, _signal.SIGINT, signal.default_int_handler)


def run_main(source: bytes, names: dict[str, Any]) -> int:
    """Run as the program `main.py` with the globals of its module; returns the exit status for `finish`."""
    lines = source.decode("utf-8", "replace").splitlines(True)
    linecache.cache[_FILENAME] = (len(source), None, lines, _FILENAME)
    threading.main_thread()._native_id = os.getpid()  # type: ignore[attr-defined]
    try:
        exec(compile(source, _FILENAME, "exec", dont_inherit=True), names)
    except SystemExit as request:
        return _exit_status(request.code)
    except BaseException as error:
        status = _report(error)
        if isinstance(error, KeyboardInterrupt):
            finish(status)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        return status
    return 0


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
        if sys.excepthook is sys.__excepthook__:  # the C hook would search main.py on disk
            traceback.print_exception(error)
        else:
            sys.excepthook(type(error), error, own_frame_removed)
    except BaseException as second:  # no memory left to format a traceback, a closed stderr, a broken hook
        os.write(2, f"{type(error).__name__} (its traceback could not be printed: {type(second).__name__})\n".encode())
    return 1


def finish(status: int) -> int:
    """Run the steps of the interpreter's shutdown that a snippet can observe; returns the exit status."""
    try:
        if _registered() != _exits:
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if logging._handlerList != _handlers:  # type: ignore[attr-defined]
            logging.shutdown()
        _flush((sys.stdout, sys.stderr))
    except BaseException as error:
        os.write(2, f"{type(error).__name__} at exit: {error}\n".encode(errors="backslashreplace"))
        return status or _FLUSH_FAILED
    return status


def _flush(streams: Iterable[Any]) -> None:
    for stream in streams:
        if stream is not None and not stream.closed:
            stream.flush()
