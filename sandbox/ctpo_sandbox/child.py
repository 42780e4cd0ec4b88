"""The forked child: gives up its rights, then behaves like `python main.py` until it exits."""

import os
import tempfile
import traceback
from dataclasses import dataclass
from typing import NoReturn

from ctpo_sandbox.confine import Confinement
from ctpo_sandbox.libraries import reseed
from ctpo_sandbox.program import bound_outputs, explain_processes, run_main

SETUP_DONE = b"\0"
_SETUP_FD = 3
_WORKER_FILES = 256  # more than a worker ever has open
_SETUP_FAILED = 70
_REPORT_FAILED = 1


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
        bound_outputs()
        if not confinement.may_kill_itself:  # neither may it have other processes
            explain_processes()
        os.write(report, SETUP_DONE)
        os.close(report)
    except BaseException:
        os.write(report, traceback.format_exc()[-4000:].encode())
        os._exit(_SETUP_FAILED)
    status = _REPORT_FAILED
    try:
        status = run_main(source)
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
