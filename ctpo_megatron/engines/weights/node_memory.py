"""Memory in which receivers on one node fetch weights together: each bucket is fetched by one of them, for all.

The memory has no name in any file system, so nothing of it is left when processes die, and the size of `/dev/shm` does
not matter. The first receiver makes it (`memfd_create`), and gives its descriptor to others of the same user, at an
abstract Unix socket that only processes of this node can reach. A lock on a byte says who fetches a bucket; the
kernel releases it when that process dies.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ctpo_megatron.engines.timeouts import LATE_NEIGHBOUR_S, MEETING_POLL_S, MEETING_S
from ctpo_megatron.engines.weights.buckets import aligned

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
"""Of the process at the other end of a Unix socket: process, user, group."""


class NoMeetingError(OSError):
    """This receiver cannot share memory with its neighbours; the message says why."""


class NodeMemory:
    """Buckets of `sizes`. Bytes at the beginning tell which of them are complete."""

    def __init__(self, descriptor: int, sizes: Sequence[int]) -> None:
        """Takes the descriptor over. Raises NoMeetingError when it is of other buckets."""
        self._descriptor, self._sizes = descriptor, sizes
        ends = list(itertools.accumulate(sizes, lambda end, size: aligned(end) + size, initial=len(sizes)))
        self._places = [aligned(end) for end in ends[:-1]]
        try:
            if os.fstat(descriptor).st_size not in (0, ends[-1]):
                raise NoMeetingError("a neighbour fetches other buckets")
            os.truncate(descriptor, ends[-1])
            self._complete = np.frombuffer(mmap.mmap(descriptor, len(sizes)), np.uint8)
            # Who loads a tensor may write to it: neighbours do not see that.
            self._private = mmap.mmap(descriptor, ends[-1], access=mmap.ACCESS_COPY)
        except BaseException:
            os.close(descriptor)
            raise

    def claim(self, number: int) -> bool:
        """Whether this process is to fetch a bucket: no other does. Threads of one process are not kept apart."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True

    def release(self, number: int) -> None:
        """Another process may fetch it, unless it is complete."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def write(self, number: int, content: memoryview) -> None:
        """From now on all receivers may use it. Faster than to receive into mapped memory, page by page."""
        place = self._places[number]
        while content:
            written = os.pwrite(self._descriptor, content, place)
            content, place = content[written:], place + written
        self._complete[number] = 1

    def is_complete(self, number: int) -> bool:
        """Whether it can be used."""
        return bool(self._complete[number])

    def content(self, number: int) -> npt.NDArray[np.uint8]:
        """A complete bucket; what is written to it stays here. It outlives this object."""
        return np.frombuffer(self._private, np.uint8, self._sizes[number], self._places[number])

    def close(self) -> None:
        """Give up what was claimed."""
        os.close(self._descriptor)


class Host(NodeMemory):
    """The receiver that made the memory: it gives it to its neighbours, also to one that comes late."""

    def __init__(self, descriptor: int, sizes: Sequence[int], listener: socket.socket, neighbours: int) -> None:
        super().__init__(descriptor, sizes)
        self._listener, self._neighbours = listener, neighbours
        self._over = threading.Event()
        threading.Thread(target=self._give, name="weights of the node", daemon=True).start()

    def close(self) -> None:
        """Neighbours that are late can have it for a while."""
        self._over.set()

    def _give(self) -> None:
        try:
            with self._listener:
                self._give_to_neighbours()
        except OSError as error:  # neighbours that have not got it fetch for themselves
            log.warning("weights: received weights cannot be given to engines of this node: %s", error)
        finally:
            self._over.wait()  # closing any descriptor of the memory would give up this process's claims
            super().close()

    def _give_to_neighbours(self) -> None:
        given, until = 0, float("inf")
        self._listener.settimeout(MEETING_POLL_S)
        while given < self._neighbours and time.monotonic() < until:
            if self._over.is_set():
                until = min(until, time.monotonic() + LATE_NEIGHBOUR_S)
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            with peer, suppress(ConnectionError):  # a neighbour that has ended
                if _user_of(peer) == os.geteuid():
                    socket.send_fds(peer, [b"\0"], [self._descriptor])
                    given += 1


def meet(name: str, sizes: Sequence[int], receivers: int) -> NodeMemory:
    """The memory of the receivers that meet under this name, made by the first of them.

    Raises NoMeetingError, after seconds at most, when there is none to be had.
    """
    address, deadline = f"\0ctpo-weights-{name}", time.monotonic() + MEETING_S
    while time.monotonic() < deadline:
        try:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(MEETING_S)
                peer.connect(address)
                if (user := _user_of(peer)) != os.geteuid():
                    raise NoMeetingError(f"user {user} has the name under which receivers of this node meet")
                _, descriptors, *_ = socket.recv_fds(peer, 1, 1, socket.MSG_CMSG_CLOEXEC)
                if descriptors:
                    return NodeMemory(descriptors[0], sizes)
        except (ConnectionError, TimeoutError):
            if (host := _host(address, sizes, receivers)) is not None:
                return host
        except NoMeetingError:
            raise
        except OSError as error:  # no descriptor or memory left, a full backlog, or it is not permitted
            raise NoMeetingError(str(error)) from error
    raise NoMeetingError(f"no answer of the receiver that meets its neighbours, in {MEETING_S:g} s")


def _host(address: str, sizes: Sequence[int], receivers: int) -> Host | None:
    """None where another process is the first."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)
        listener.listen(receivers)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise NoMeetingError(str(error)) from error
        time.sleep(MEETING_POLL_S / 10)  # it has the name, but does not listen yet
        return None
    try:
        return Host(os.memfd_create("ctpo-weights"), sizes, listener, receivers - 1)
    except OSError as error:
        listener.close()
        raise NoMeetingError(str(error)) from error


def _user_of(peer: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
