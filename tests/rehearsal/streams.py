"""Streams of pretended GPUs: what each operation comes after, and which tensors are used too early.

An operation has a number in its stream. A clock says of each stream up to which operation something is ordered: a
stream's `after` of its next operation, an event's of what was recorded, the host's of what it has waited for.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tests.rehearsal import synchronizations

if TYPE_CHECKING:
    from tests.rehearsal.allocator import Allocator

Clock = dict[int, int]
"""Number of a stream -> operations of it."""
_TORCH = Path(torch.__file__).parent
_OURS = {
    Path(__file__).with_name(f"{name}.py")
    for name in ("allocator", "answers", "claims", "collectives", "rules", "streams", "torch_cuda")
}
_numbers = itertools.count()
_host: Clock = {}


class UnorderedAccess(AssertionError):
    """A tensor is used on a stream that does not come after what another stream does with it."""


class Stream:
    """`torch.cuda.Stream`. submitted: how many operations it has been given."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **_: Any) -> None:
        process, self.number = here(), next(_numbers)
        self.cuda_stream = self.stream_id = self.number
        self.name = f"{process.name}'s {name or f'stream {self.number}'}"
        self.submitted = 0
        self.after: Clock = {}
        process.streams.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", here().index)

    def point(self) -> Clock:
        """All that it has been given, and what comes before."""
        return {**self.after, self.number: self.submitted}

    def wait_stream(self, other: Stream) -> None:
        _merge(self.after, other.point())

    def wait_event(self, event: Event) -> None:
        _merge(self.after, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        note("Stream.synchronize", self)

    def comes_after(self, use: Use) -> bool:
        """Whether its next operation does."""
        number = use.stream.number
        return use.stream is self or max(_host.get(number, 0), self.after.get(number, 0)) >= use.number


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or current()).point()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        synchronizations.count("Event.synchronize")
        _merge(_host, self.clock)


class Use(NamedTuple):
    """Operation `number` of a stream, what it did, to which tensor, and from which line of which code."""

    stream: Stream
    number: int
    what: str
    shape: torch.Size
    dtype: torch.dtype
    code: CodeType
    line: int

    def __str__(self) -> str:
        where = f"{'/'.join(Path(self.code.co_filename).parts[-3:])}:{self.line}"
        return f"{self.what} of {tuple(self.shape)} {self.dtype} on {self.stream.name} at {where}"


class Uses:
    """Of one tensor's memory, as far as a later use has to come after them. reads: by stream, since it was written."""

    def __init__(self, former: dict[int, Use] | None = None) -> None:
        """former: of tensors that had this memory before."""
        self.written: Use | None = None
        self.reads: dict[int, Use] = dict(former or {})

    def all(self) -> dict[int, Use]:
        """The latest of each stream."""
        found = dict(self.reads)
        if self.written is not None:
            found.setdefault(self.written.stream.number, self.written)
        return found

    def read(self, use: Use) -> None:
        """Raises UnorderedAccess when `use` may be earlier than the write."""
        self._demand(use, self.written)
        self.reads[use.stream.number] = use

    def write(self, use: Use) -> None:
        """Raises UnorderedAccess when `use` may be earlier than a read or the write."""
        for earlier in (self.written, *self.reads.values()):
            self._demand(use, earlier)
        self.written, self.reads = use, {}

    def _demand(self, use: Use, earlier: Use | None) -> None:
        if earlier is not None and not use.stream.comes_after(earlier):
            raise UnorderedAccess(f"{use} does not wait for {earlier}")


class Process:
    """A process of a pretended node. index: the GPU that it has selected. memory: None where it is not counted."""

    def __init__(self, name: str, index: int = 0, memory: Allocator | None = None) -> None:
        self.name, self.index, self.memory = name, index, memory
        self.streams: list[Stream] = []
        with running(self):
            self.default = Stream(name="default stream")


class _Thread(threading.local):
    """process: that this thread belongs to. streams: the current one, by process."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self.streams: dict[Process, Stream] = {}


_thread = _Thread()


@contextlib.contextmanager
def running(process: Process) -> Iterator[None]:
    """This thread belongs to a process within."""
    before, _thread.process = _thread.process, process
    try:
        yield
    finally:
        _thread.process = before


def here() -> Process:
    """The process that this thread belongs to."""
    return _thread.process or _own


_own = Process("rank")


def current(*_: Any) -> Stream:
    """`torch.cuda.current_stream`: of this thread."""
    process = here()
    return _thread.streams.get(process, process.default)


def select(stream: Stream) -> None:
    """`torch.cuda.set_stream`."""
    _thread.streams[here()] = stream


def default(*_: Any) -> Stream:
    """`torch.cuda.default_stream`."""
    return here().default


def note(what: str, *streams: Stream) -> None:
    """The host waits for streams now; for none: for the current one."""
    synchronizations.count(what)
    for stream in streams or (current(),):
        _merge(_host, stream.point())


def synchronize(*_: Any) -> None:
    """`torch.cuda.synchronize`."""
    note("torch.cuda.synchronize", *here().streams)


def launch(what: str, reads: Iterable[tuple[Uses, torch.Tensor]], writes: Iterable[tuple[Uses, torch.Tensor]]) -> None:
    """Give the current stream an operation. Raises UnorderedAccess."""
    stream, (code, line) = current(), _caller()
    stream.submitted += 1
    for uses, tensor in reads:
        uses.read(Use(stream, stream.submitted, f"{what} reads", tensor.shape, tensor.dtype, code, line))
    for uses, tensor in writes:
        uses.write(Use(stream, stream.submitted, f"{what} writes", tensor.shape, tensor.dtype, code, line))


def is_over(uses: dict[int, Use]) -> bool:
    """Whether the host has waited for all of them."""
    return all(_host.get(number, 0) >= found.number for number, found in uses.items())


def _caller() -> tuple[CodeType, int]:
    """The nearest line that is neither torch's nor of this rehearsal."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


@cache
def _is_ours(file: str) -> bool:
    return _TORCH in Path(file).parents or Path(file) in _OURS


def _merge(clock: Clock, other: Clock) -> None:
    for number, operations in other.items():
        clock[number] = max(clock.get(number, 0), operations)
