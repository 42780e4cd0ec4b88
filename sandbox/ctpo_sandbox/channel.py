"""What passes between the server and its processes: messages with deadlines, and memory files for code and output."""

import asyncio
import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ctpo_sandbox.records import MAX_MESSAGE_BYTES


class WorkerLost(Exception):
    """A template or worker died, hung, or could not confine its child: no statement about the snippet."""


@contextmanager
def _memory_files(*contents: bytes) -> Iterator[list[int]]:
    descriptors: list[int] = []
    try:
        for content in contents:
            descriptors.append(os.memfd_create("ctpo-sandbox", os.MFD_CLOEXEC))
            view = memoryview(content)
            while view:
                view = view[os.pwrite(descriptors[-1], view, len(content) - len(view)) :]
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def run_files(code: bytes, stdin: bytes) -> Iterator[list[int]]:
    """Descriptors of the four files of a run: code, stdin, and two outputs that only grow."""
    with _memory_files(code, stdin, b"", b"") as files:
        for output in files[2:]:
            _append_only(output)
        yield files


def _append_only(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)


def read_output(descriptor: int, limit: int) -> tuple[str, bool]:
    """The text, and whether it was cut."""
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, limit, 0).decode("utf-8", errors="replace")
    if size <= limit:
        return text, False
    return f"{text}\n[output cut: the first {limit} of {size} bytes]\n", True


class Channel:
    """Our end of a socket to a process, read with deadlines."""

    def __init__(self, name: str, control: socket.socket) -> None:
        self.name = name
        self._control = control
        control.setblocking(False)

    def send(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Raises WorkerLost."""
        try:
            socket.send_fds(self._control, [message], descriptors)
        except OSError as error:
            raise WorkerLost(f"{self.name} did not take a request: {error}") from error

    async def receive(self, timeout_s: float, purpose: str) -> bytes:
        """The next message. Raises WorkerLost when none comes in time, or ever."""
        return (await self.receive_descriptor(timeout_s, purpose))[0]

    async def receive_descriptor(self, timeout_s: float, purpose: str) -> tuple[bytes, list[int]]:
        """The next message and the descriptors that came with it."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        descriptor = self._control.fileno()  # kept, because the socket may be closed meanwhile
        loop.add_reader(descriptor, lambda: None if readable.done() else readable.set_result(None))
        try:
            async with asyncio.timeout(timeout_s):
                await readable
            message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        except TimeoutError:
            raise WorkerLost(f"waited {timeout_s:g} s for {self.name} {purpose}") from None
        except OSError as error:
            raise WorkerLost(f"the connection to {self.name} broke: {error}") from error
        finally:
            loop.remove_reader(descriptor)
        if not message:
            raise WorkerLost(f"{self.name} died instead of being there {purpose}")
        return message, descriptors

    def close(self) -> None:
        self._control.close()
