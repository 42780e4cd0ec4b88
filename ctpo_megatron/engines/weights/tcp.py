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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

SECRET_BYTES = 32
Buffer = npt.NDArray[np.uint8]
Entry = tuple[str, str, tuple[int, ...], int, int]
"""Name, dtype (as torch names it), shape, first byte, bytes."""

ALIGNED = 64
"""Every tensor begins at a multiple of this many bytes."""

REQUEST = struct.Struct("!QQQ")
STREAMS = 2
"""Connections of an engine to a rank, which take turns. One would be as slow as the thread that sends."""
_PORTION = 1 << 20
"""Bytes for which a receiver is woken: to wake it for every packet costs the sender time."""


@dataclass(frozen=True)
class Share:
    """What one rank serves, and where."""

    host: str
    port: int
    entries: Sequence[Entry]


@dataclass
class FetchMessage:
    """What an engine needs in order to fetch. shares: fields of each `Share`. secret: in hexadecimal digits."""

    shares: list[tuple[str, int, Sequence[Entry]]]
    secret: str = field(repr=False)
    version: int
    bucket_bytes: int
    timeout_s: float


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors of one share, which are fetched together."""

    share: int
    entries: list[Entry]

    @property
    def first(self) -> int:
        return self.entries[0][3]

    @property
    def end(self) -> int:
        return self.entries[-1][3] + self.entries[-1][4]

    @property
    def size(self) -> int:
        return self.end - self.first


def plan(shares: Sequence[Share], bucket_bytes: int) -> list[Bucket]:
    """All tensors in buckets of `bucket_bytes` at most, or of one tensor, layer by layer, of each rank in its order.

    vLLM keeps tensors of a layer until it has all of them, which may come from several ranks. A rank may still be
    copying, in its order; what is of no layer comes where it stands.
    """
    order: list[tuple[int, int, Entry]] = []
    for number, share in enumerate(shares):
        layer = -1
        for entry in share.entries:
            layer = _layer(entry[0], layer)
            order.append((layer, number, entry))
    order.sort(key=lambda item: (item[0], item[1], item[2][3]))
    buckets: list[Bucket] = []
    for _, number, entry in order:
        last = buckets[-1] if buckets else None
        follows = last is not None and last.share == number and 0 <= entry[3] - last.end < ALIGNED
        if last is not None and follows and entry[3] + entry[4] - last.first <= bucket_bytes:
            last.entries.append(entry)
        else:
            buckets.append(Bucket(number, [entry]))
    return buckets


def fetched(
    shares: Sequence[Share], secret: bytes, version: int, bucket_bytes: int, timeout_s: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU) of all shares; a bucket arrives while the one before is used.

    timeout_s: deadline of every operation on a connection. Raises ConnectionError naming the address of a rank that is
    late or gone, does not have this version, or refuses the secret.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(STREAMS, thread_name_prefix="weights"))
        streams: list[list[_Peer]] = [[] for _ in range(STREAMS)]
        for stream in streams:
            for share in shares:
                stream.append(stack.enter_context(_Peer(share, secret, version, timeout_s)))
        buckets = plan(shares, bucket_bytes)
        buffers = _Buffers(min(bucket_bytes, max((bucket.size for bucket in buckets), default=0)))
        coming: deque[tuple[Bucket, Future[torch.Tensor]]] = deque()
        for bucket, peers in zip(buckets, itertools.cycle(streams), strict=False):
            coming.append((bucket, pool.submit(peers[bucket.share].fetch, bucket, buffers)))
            if len(coming) == STREAMS:  # the connection that is next has nothing to do
                yield from _tensors(*coming.popleft())
        while coming:
            yield from _tensors(*coming.popleft())


def _tensors(bucket: Bucket, content: Future[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    data = content.result()
    for name, dtype_name, shape, first, size in bucket.entries:
        dtype: torch.dtype = getattr(torch, dtype_name)
        start = first - bucket.first
        yield name, data[start : start + size].view(dtype).view(shape)


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

    def __init__(self, share: Share, secret: bytes, version: int, timeout_s: float) -> None:
        self._version = version
        self._name = f"weights of {share.host}:{share.port}"
        try:
            self._socket = socket.create_connection((share.host, share.port), timeout=timeout_s)
            self._socket.sendall(secret)
        except OSError as error:
            raise ConnectionError(f"{self._name}: {error}") from error

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the other side may have gone
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a fetch whose result is not needed any more
        self._socket.close()

    def fetch(self, bucket: Bucket, buffers: _Buffers) -> torch.Tensor:
        """Its bytes."""
        content = buffers.take(bucket.size)
        try:
            self._socket.sendall(REQUEST.pack(self._version, bucket.first, bucket.size))
            receive(self._socket, content.data, _PORTION)
        except OSError as error:
            raise ConnectionError(f"{self._name}, version {self._version}: {error}") from error
        return torch.from_numpy(content)


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


def _layer(name: str, default: int) -> int:
    """Number of the layer that a tensor is of; `default` of those in none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), default)
