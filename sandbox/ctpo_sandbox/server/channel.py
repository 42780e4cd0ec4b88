"""Communication between the server and its processes: messages with deadlines, and memory files for code and output."""

import asyncio
import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ctpo_sandbox.errors import WorkerLost
from ctpo_sandbox.records import MAX_MESSAGE_BYTES


@contextmanager
def run_files(code: bytes, stdin: bytes) -> Iterator[list[int]]:
    """Descriptors of the four files of a run in memory: code, stdin, and two append-only outputs."""
    files: list[int] = []
    try:
        for content in (code, stdin, b"", b""):
            files.append(os.memfd_create("ctpo-sandbox", os.MFD_CLOEXEC))
            view = memoryview(content)
            while view:
                view = view[os.pwrite(files[-1], view, len(content) - len(view)) :]
        for output in files[2:]:
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
        yield files
    finally:
        for file in files:
            os.close(file)


def read_output(descriptor: int, limit: int) -> tuple[str, bool]:
    """Return the text, and whether it was cut."""
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, min(size, limit), 0).decode("utf-8", errors="replace")
    if size <= limit:
        return text, False
    return f"{text}\n[output cut: the first {limit} of {size} bytes]\n", True


class Channel:
    """The server's end of a socket to a process, read with deadlines."""

    def __init__(self, name: str, control: socket.socket) -> None:
        self.name = name
        self._control = control
        self._loop: asyncio.AbstractEventLoop | None = None
        self._message: asyncio.Future[tuple[bytes, list[int]]] | None = None
        control.setblocking(False)

    def send(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Raises WorkerLost."""
        try:
            socket.send_fds(self._control, [message], descriptors)
        except OSError as error:
            raise WorkerLost(f"{self.name} did not take a request: {error}") from error

    async def receive(self, timeout_s: float, purpose: str) -> bytes:
        """Return the next message. Raises WorkerLost when none comes in time, or the process is gone."""
        return (await self.receive_descriptor(timeout_s, purpose))[0]

    async def receive_descriptor(self, timeout_s: float, purpose: str) -> tuple[bytes, list[int]]:
        """Return the next message and the descriptors that came with it."""
        loop = asyncio.get_running_loop()
        self._message = loop.create_future()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._control, self._read)
        deadline = loop.call_later(timeout_s, self._fail, TimeoutError())
        try:
            message, descriptors = await self._message
        except TimeoutError:
            raise WorkerLost(f"waited {timeout_s:g} s for {self.name} {purpose}") from None
        except OSError as error:
            raise WorkerLost(f"the connection to {self.name} broke: {error}", died=True) from error
        finally:
            deadline.cancel()
        if not message:
            raise WorkerLost(f"{self.name} died instead of being there {purpose}", died=True)
        return message, descriptors

    def _read(self) -> None:
        if self._message is None or self._message.done():  # left for the next receive
            self._stop_reading()
            return
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        except OSError as error:
            self._fail(error)
        else:
            self._message.set_result((message, descriptors))

    def _fail(self, error: Exception) -> None:
        if self._message is not None and not self._message.done():
            self._message.set_exception(error)

    def _stop_reading(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        self._loop = None

    def close(self) -> None:
        self._stop_reading()
        self._control.close()
