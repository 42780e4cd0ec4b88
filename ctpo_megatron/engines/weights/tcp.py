"""Weights over TCP as an engine fetches them from all trainer ranks; `tcp_transport` is the other end.

An engine sends the run's secret, then asks for byte ranges of what a rank holds: version, first byte, length. What the
rank has not copied yet is sent as soon as it is there. There is no encryption; the network has to be private.
"""

from __future__ import annotations

import itertools
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ctpo_megatron.engines.weights.buckets import Bucket, Entry, Piece, Share, dtype_of, plan, rotated

SECRET_BYTES = 32
Buffer = npt.NDArray[np.uint8]
Contents = Generator[tuple[int, Buffer], None, None]
"""Numbers of buckets with their bytes."""
_Peers = Sequence["_Peer"]
"""A connection to the rank of each share."""
_Fetch = Callable[[int], Buffer]
"""Fetches the bucket of this number."""

REQUEST = struct.Struct("!QQQ")
STREAMS = 2
"""Connections of an engine to a rank, which take turns. One would be as slow as the thread that sends."""
_PORTION = 1 << 20
"""Bytes for which a receiver is woken: to wake it for every packet costs the sender time."""
_ASKED = 64
"""Pieces of a bucket that are asked for before the first of them is read."""


@dataclass
class FetchMessage:
    """What an engine needs in order to fetch.

    shares: fields of each `Share`. secret: in hexadecimal digits. number, of: of the engine, among all that fetch.
    """

    shares: Sequence[tuple[str, int, Sequence[Sequence[Any]]]]
    secret: str = field(repr=False)
    version: int
    bucket_bytes: int
    timeout_s: float
    number: int = 0
    of: int = 1


def fetched(message: FetchMessage) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU) of all shares; buckets arrive while the one before is used.

    timeout_s: of every operation on a connection. Raises ConnectionError naming the address of a rank that is late or
    gone, does not have this version, or refuses the secret. Raises ValueError where the shares are not the whole of
    each tensor.
    """
    shares = [Share(host, port, [Entry(*entry) for entry in entries]) for host, port, entries in message.shares]
    buckets = plan(shares, message.bucket_bytes)
    order = rotated(buckets, message.number, message.of)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(STREAMS, thread_name_prefix="weights"))
        streams = [[stack.enter_context(_Peer(share, message)) for share in shares] for _ in range(STREAMS)]
        buffers = _Buffers(min(message.bucket_bytes, max((bucket.size for bucket in buckets), default=0)))

        def fetch(number: int, peers: _Peers) -> Buffer:
            content = buffers.take(buckets[number].size)
            _fetch(buckets[number], peers, content.data)
            return content

        fetches = [partial(fetch, peers=peers) for peers in streams]
        contents = _fetched_ahead(order, fetches, pool)
        stack.enter_context(closing(contents))  # before the pool, whose threads wait for more until then
        yield from itertools.chain.from_iterable(itertools.starmap(partial(_tensors, buckets), contents))


def _tensors(buckets: Sequence[Bucket], number: int, content: Buffer) -> Iterator[tuple[str, torch.Tensor]]:
    data = torch.from_numpy(content)
    for name, dtype, shape, place, size in buckets[number].tensors:
        yield name, data[place : place + size].view(dtype_of(dtype)).view(shape)


def _fetched_ahead(order: Sequence[int], fetches: Sequence[_Fetch], pool: Executor) -> Contents:
    """The buckets, of which each stream fetches one ahead."""
    coming: deque[tuple[int, Future[Buffer]]] = deque()
    for number, fetch in zip(order, itertools.cycle(fetches), strict=False):
        coming.append((number, pool.submit(fetch, number)))
        if len(coming) == len(fetches):  # the connections that are next have nothing to do
            yield _arrived(*coming.popleft())
    while coming:
        yield _arrived(*coming.popleft())


def _arrived(number: int, content: Future[Buffer]) -> tuple[int, Buffer]:
    return number, content.result()


def _fetch(bucket: Bucket, peers: _Peers, into: memoryview) -> None:
    """Its bytes, from all ranks that hold some."""
    asked: deque[Piece] = deque()
    for piece in bucket.pieces:
        peers[piece.share].ask(piece)
        asked.append(piece)
        if len(asked) == _ASKED:  # a rank that is sending reads no more than fits in a buffer
            _take(asked.popleft(), peers, into)
    for piece in asked:
        _take(piece, peers, into)


def _take(piece: Piece, peers: _Peers, into: memoryview) -> None:
    peers[piece.share].take(into[piece.place : piece.place + piece.size])


class _Buffers:
    """Memory for buckets, taken again once no tensor in it is used any more: new pages take longer than to receive."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: deque[Buffer] = deque()

    def take(self, size: int) -> Buffer:
        """Memory of `size` bytes; larger ones than a bucket are new each time."""
        if size > self._size:
            return np.empty(size, dtype=np.uint8)
        try:
            whole = self._free.popleft()
        except IndexError:
            whole = np.empty(self._size, dtype=np.uint8)
        part = whole[:size]  # what a tensor keeps alive
        weakref.finalize(part, self._free.append, whole).atexit = False
        return part


class _Peer:
    """An engine's connection to one rank."""

    def __init__(self, share: Share, message: FetchMessage) -> None:
        self._version = message.version
        self._name = f"weights of {share.host}:{share.port}"
        try:
            self._socket = socket.create_connection((share.host, share.port), timeout=message.timeout_s)
            self._socket.sendall(bytes.fromhex(message.secret))
        except OSError as error:
            raise ConnectionError(f"{self._name}: {error}") from error

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the other side may have gone
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a fetch whose result is not needed any more
        self._socket.close()

    def ask(self, piece: Piece) -> None:
        """Have it sent."""
        with self._named():
            self._socket.sendall(REQUEST.pack(self._version, piece.first, piece.size))

    def take(self, into: memoryview) -> None:
        """Fill `into` with the bytes of the oldest request that is still open."""
        with self._named():
            receive(self._socket, into, _PORTION)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConnectionError(f"{self._name}, version {self._version}: {error}") from error


def receive(peer: socket.socket, into: memoryview, portion: int = 1) -> None:
    """Fill `into`, in parts of `portion` bytes at least or of what is missing.

    Raises ConnectionError when the other side ends before, TimeoutError when a part is late.
    """
    while into:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(portion, len(into)))
        count = peer.recv_into(into)
        if count == 0:
            raise ConnectionError(f"closed by the other side, {len(into)} bytes short")
        into = into[count:]
