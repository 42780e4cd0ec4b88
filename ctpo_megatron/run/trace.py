"""What a rank writes of where it is: its stacks when it stands still, and traces of steps (`run.profile_steps`)."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ctpo_megatron.base.run_paths import step_name
from ctpo_megatron.tracking import Phases, Progress

log = logging.getLogger(__name__)

_SHARE = 0.9
"""Of a time-out: the stacks are written before it ends the run."""
LARGEST = 1 << 28
"""Bytes of a trace, compressed, above which the log says that viewers may not open it."""


class StepTrace:
    """Records from its creation on; the phases of the rank are ranges named as their metrics, `time/<phase>`.

    On CUDA they are NVTX ranges, too, for Nsight Systems. Operators and kernels have no shapes and no stacks, which
    would multiply the size. Operators of other threads than the caller's are not recorded.
    """

    def __init__(self, phases: Phases, step: int) -> None:
        self._phases, self._former = phases, phases.mark
        self._cuda = torch.cuda.is_available()
        self._open = ExitStack()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = self._open.enter_context(profile(activities=activities))
        self._open.enter_context(self._range(step_name(step)))
        phases.mark = self._range

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(record_function(name))
            if self._cuda:
                stack.enter_context(torch.cuda.nvtx.range(name))
            yield

    def write(self, path: Path) -> None:
        """End the recording, and write it as Perfetto reads it. A failure is logged: the run continues."""
        self._phases.mark = self._former
        self._open.close()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
        except OSError as error:
            log.warning("no trace at %s: %s", path, error)
            return
        if (size := path.stat().st_size) > LARGEST:
            log.warning("%s has %.0f MiB; docs/monitoring.md says how to read it", path, size / 2**20)


@contextmanager
def stack_dump(path: Path, timeout_s: float, progress: Progress) -> Iterator[None]:
    """Within, the stacks of all threads are appended to `path` when this rank makes no progress for most of a time-out.

    faulthandler's thread needs no lock of Python, so that a rank in C code is seen, too. timeout_s: seconds that a
    collective may take. progress: of this rank.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab", buffering=0)
    progress.on_advance = partial(faulthandler.dump_traceback_later, _SHARE * timeout_s, file=file)
    progress.on_advance()
    try:
        yield
    finally:
        progress.on_advance = lambda: None
        faulthandler.cancel_dump_traceback_later()
        file.close()
        with suppress(OSError):  # another rank's file is in the folder, or it was removed
            if path.stat().st_size == 0:
                path.unlink()
            path.parent.rmdir()
