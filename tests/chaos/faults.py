"""What happens to a run of a long life: processes killed and frozen, the network cut, a disk filled, a clock moved."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos import kills, machine
from tests.support.deadlines import scaled

FREEZES_S = 1.0, 6.0
CUTS_S = 0.5, 3.0
FULL_S = 1.0, 4.0
MOVES_S = (-7200.0, -60.0, 60.0, 7200.0)
ENDING = ("kill trainer", "kill gcs", "kill raylet")
"""A run that these happen to is started again. They come early: what starts last is to live long."""
EARLY = 0.4
"""Share of the steps."""
KINDS = (
    *(f"kill {kind}" for kind in ("engine", "sandbox server", "sandbox worker", "scorer", "results queue")),
    *(f"freeze {kind}" for kind in ("engine", "sandbox server", "scorer", "trainer", "raylet")),
    *("cut network", "fill disk", "move clock"),
)


@dataclass(frozen=True)
class Fault:
    """step: after which it is due."""

    step: int
    kind: str


def plan(seed: int, steps: int, count: int, without: Sequence[str] = ()) -> list[Fault]:
    """`count` faults by step, of every kind about as many; those that end the run are 15 % of them.

    Raises ValueError for a name in `without` that is no kind.
    """
    if unknown := set(without) - {*KINDS, *ENDING}:
        raise ValueError(f"no faults: {', '.join(sorted(unknown))}; there are {', '.join((*KINDS, *ENDING))}")
    rng = random.Random(seed)
    kinds = [kind for kind in rng.sample(KINDS, len(KINDS)) if kind not in without]
    ending = [kind for kind in ENDING if kind not in without]
    last = max(1, round(0.15 * count)) if ending else 0
    found = [Fault(rng.randint(2, max(2, int(EARLY * steps))), ending[n % len(ending)]) for n in range(last)]
    found += [Fault(rng.randint(2, steps - 4), kind) for kind in itertools.islice(itertools.cycle(kinds), count - last)]
    return sorted(found, key=lambda fault: (fault.step, fault.kind in ENDING))


class Faults:
    """Does to a run what is planned. disk: the small file system that it writes to. clock: a file of `moved_clock`."""

    def __init__(self, seed: int, disk: Path, clock: Path) -> None:
        self._rng, self._disk, self._clock = random.Random(seed), disk, clock
        self._offset = 0.0

    def do(self, kind: str, run: int) -> str:
        """One fault, until it is over; what was done.

        Raises ProcessLookupError when the run is gone, AssertionError when there is nothing to do it to.
        """
        verb, _, what = kind.partition(" ")
        does: dict[str, Callable[[int, str], str]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "cut": self._cut,
            "fill": self._fill,
            "move": self._move,
        }
        return does[verb](run, what)

    def _kill(self, run: int, what: str) -> str:
        while True:
            process = self._one(run, what)
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, as a worker of the sandbox may
                process.kill()
                return f"process {process.pid}"

    def _freeze(self, run: int, what: str) -> str:
        process, seconds = self._one(run, what), self._rng.uniform(*FREEZES_S)
        with contextlib.suppress(psutil.NoSuchProcess):  # replaced meanwhile
            process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            process.send_signal(signal.SIGCONT)
        return f"process {process.pid} for {seconds:.1f} s"

    def _cut(self, _run: int, _what: str) -> str:
        seconds = self._rng.uniform(*CUTS_S)
        machine.set_network(up=False)
        time.sleep(seconds)
        machine.set_network(up=True)
        return f"for {seconds:.1f} s"

    def _fill(self, _run: int, _what: str) -> str:
        seconds = self._rng.uniform(*FULL_S)
        with filled(self._disk):
            time.sleep(seconds)
        return f"for {seconds:.1f} s"

    def _move(self, _run: int, _what: str) -> str:
        by = self._rng.choice(MOVES_S)
        self._offset += by
        self._clock.write_text(f"{self._offset}")
        return f"by {by:g} s"

    def _one(self, run: int, kind: str) -> psutil.Process:
        """Waits for one: what was there may just have been killed."""
        deadline = time.monotonic() + scaled(60)
        while time.monotonic() < deadline:
            try:
                if there := kills.of_kind(run, kind):
                    return self._rng.choice(there)
            except psutil.NoSuchProcess as gone:
                raise ProcessLookupError(f"the run, process {run}, is gone") from gone
            time.sleep(0.1)
        raise AssertionError(f"no {kind} in {scaled(60):g} s")


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """No byte is free on this file system within."""
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while os.write(file.fileno(), bytes(size)) == size:
                        pass
        try:
            (disk / "one more").write_bytes(b"x" * (1 << 12))
            raise AssertionError(f"{disk} is not full")
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
        yield
    finally:
        filler.unlink(missing_ok=True)
        (disk / "one more").unlink(missing_ok=True)
