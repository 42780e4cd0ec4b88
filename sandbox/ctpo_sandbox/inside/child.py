"""The forked child: drops its privileges, then behaves like `python -u main.py` until it exits.

Every memory page that it writes to is copied, and even reading a Python object writes to it (reference counts). So its
worker prepares everything that can be prepared.
"""

import os
import sys
import traceback
from functools import partial
from typing import Any, NamedTuple, NoReturn

from ctpo_sandbox.inside import program
from ctpo_sandbox.inside.libraries import seeders
from ctpo_sandbox.inside.program import finish, run_main
from ctpo_sandbox.isolation import landlock
from ctpo_sandbox.isolation.confine import Confinement
from ctpo_sandbox.isolation.libc import Step, perform

SETUP_DONE = b"\0"
_STANDARD_FILES = 3
_WORKER_FILES = 256  # more than a worker has open when it forks
_SETUP_FAILED = 70
_REPORT_FAILED = 1


class RunFiles(NamedTuple):
    """Descriptors of the four memory files of a run."""

    code: int
    stdin: int
    stdout: int
    stderr: int


class PreparedChild(NamedTuple):
    """What a child does, prepared by its worker.

    code: descriptor of the snippet. steps: run before its first line. report: descriptor to which they write
    `SETUP_DONE`, or the reason of a failure. names: globals of the snippet's module.
    """

    code: int
    steps: list[Step]
    report: int
    names: dict[str, Any]


def prepare_child(
    files: RunFiles, ruleset: int | None, cpu_limit_s: int, *, confinement: Confinement, report: int
) -> PreparedChild:
    """Prepare children of the calling process; called again when a descriptor or limit changes."""
    program.hide_frames(program.frames())
    last = max(_WORKER_FILES, confinement.limits.open_files)
    steps: list[Step] = [partial(os.setpgid, 0, 0)]
    steps += [partial(os.dup2, descriptor, standard) for standard, descriptor in enumerate(files[1:])]
    steps += [] if ruleset is None else [landlock.enforcing(ruleset)]  # the ruleset is still open
    steps += [partial(os.closerange, _STANDARD_FILES, report), partial(os.closerange, report + 1, last)]
    steps += [*confinement.steps(cpu_limit_s, os.getpid()), *seeders(), program.interrupting()]
    steps += [partial(os.write, report, SETUP_DONE), partial(os.close, report)]
    return PreparedChild(files.code, steps, report, vars(sys.modules["__main__"]))


def entering(directory: str) -> list[Step]:
    """Steps of a run before the others, that depend on its directory, which is named without links."""
    return [partial(os.chdir, os.fsencode(directory)), partial(sys.path.insert, 0, directory)]


def become_snippet(child: PreparedChild, enter: list[Step]) -> NoReturn:
    """Run the snippet in the calling process, in the directory of `enter`, and never return."""
    code, steps, report, names = child
    try:
        source = read_all(code)
        perform(enter)
        perform(steps)
    except BaseException:
        os.write(report, traceback.format_exc()[-4000:].encode())
        os._exit(_SETUP_FAILED)
    status = _REPORT_FAILED
    try:
        status = finish(run_main(source, names))
    finally:  # never return: the caller is the worker's code
        os._exit(status)


def rehearse(confinement: Confinement) -> None:
    """Run in the template what only children run, as far as possible, until bytecode and caches are warm."""
    with open(os.memfd_create("rehearsal"), "wb") as empty:
        for _ in range(program.REHEARSALS):
            read_all(empty.fileno())
            perform(confinement.harmless_steps())


def read_all(file: int) -> bytes:
    """Its content."""
    return os.pread(file, os.lseek(file, 0, os.SEEK_END), 0)
