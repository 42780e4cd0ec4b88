"""The forked child: gives up its rights, then behaves like `python main.py` until it exits.

A page of memory that it writes to is copied for each run, and looking at a Python object writes to it. So its worker
makes ready all that can be made ready.
"""

import os
import traceback
from functools import partial
from typing import NamedTuple, NoReturn

from ctpo_sandbox import landlock
from ctpo_sandbox.confine import Confinement
from ctpo_sandbox.libc import Step, perform
from ctpo_sandbox.libraries import seeders
from ctpo_sandbox.program import frames, run_main

SETUP_DONE = b"\0"
_SETUP_FD = 3
_WORKER_FILES = 256  # more than a worker ever has open
_SETUP_FAILED = 70
_REPORT_FAILED = 1


class Files(NamedTuple):
    """Descriptors of the four memory files of a run."""

    code: int
    stdin: int
    stdout: int
    stderr: int


class Child:
    """What a child of the calling worker does. Made where it is forked, and again when a descriptor or limit changes.

    setup_pipe: where it writes `SETUP_DONE` before the first line of the snippet, or why it could not get there.
    """

    def __init__(
        self,
        files: Files,
        setup_pipe: int,
        ruleset: int | None,
        cpu_limit_s: int,
        *,
        confinement: Confinement,
        directory: str,
    ) -> None:
        self._code, self._setup_pipe, self._confinement, self._worker = files.code, setup_pipe, confinement, os.getpid()
        self._frames = frames()
        self._enter: list[Step] = [partial(os.setsid), partial(os.chdir, directory)]
        self._enter += [partial(os.dup2, descriptor, standard) for standard, descriptor in enumerate(files[1:])]
        self._enter += [] if ruleset is None else [landlock.enforcing(ruleset)]  # the ruleset is still open
        self._enter.append(partial(os.dup2, setup_pipe, _SETUP_FD))
        self._confine: list[Step] = [
            partial(os.closerange, _SETUP_FD + 1, max(_WORKER_FILES, confinement.limits.open_files)),
            *confinement.steps(cpu_limit_s),
        ]
        self._seed = seeders()

    def become_snippet(self) -> NoReturn:
        """Run the snippet in the calling process and never return."""
        report = self._setup_pipe
        try:
            source = os.pread(self._code, os.lseek(self._code, 0, os.SEEK_END), 0)
            perform(self._enter)
            report = _SETUP_FD
            perform(self._confine)
            self._confinement.finish(self._worker)
            perform(self._seed)
            os.write(report, SETUP_DONE)
            os.close(report)
        except BaseException:
            os.write(report, traceback.format_exc()[-4000:].encode())
            os._exit(_SETUP_FAILED)
        status = _REPORT_FAILED
        try:
            status = run_main(source, self._frames)
        finally:  # whatever happens: what called this function is the worker's code
            os._exit(status)
