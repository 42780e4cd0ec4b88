"""The transport over TCP: every rank holds a copy of its part and serves it; rank zero tells the engines.

There is no encryption; the network has to be private.
"""

from __future__ import annotations

import hmac
import logging
import math
import mmap
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ctpo_megatron.base.addresses import own_address
from ctpo_megatron.base.tensor_rows import TensorRows
from ctpo_megatron.engines.weights.buckets import Entry, Share, aligned
from ctpo_megatron.engines.weights.checksums import Checksums, Sums, total_of
from ctpo_megatron.engines.weights.offer import EngineFacts, Ranks, TransportSettings, WeightSource
from ctpo_megatron.engines.weights.tcp import REQUEST, SECRET_BYTES, STREAMS, FetchMessage, receive

if TYPE_CHECKING:
    from ctpo_megatron.engines.updates import PendingUpdate


log = logging.getLogger(__name__)

_CONNECTIONS = 256 * STREAMS
_SECRET_TIMEOUT_S = 10.0
"""For a connection to the weight server to send the secret."""
_REFUSALS_S = 60.0
"""Between two lines about connections that the weight server refused."""
_ACCEPT_PAUSE_S = 0.2
"""After a connection that could not be accepted."""
_STRANGERS = 64
"""Connections that have not shown the secret yet; an engine shows it at once."""


class WeightMemory:
    """Bytes of tensors one after another.

    Pages are used again: to write to new ones takes several times as long, and two versions would take memory. One
    thread plans and fills; others wait for what they want of it.
    """

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self._progress = threading.Condition()
        self._filled = 0
        self.version = -1
        self.entries: list[Entry] = []
        self._parts: list[TensorRows] = []

    def plan(self, parts: Iterable[TensorRows], version: int) -> None:
        """From now on there is space for these parts of tensors of `version`, instead of the former."""
        self._parts, entries, end = list(parts), [], 0
        for part in self._parts:
            start = aligned(end)
            dtype, size = str(part.dtype).removeprefix("torch."), part.rows * part.row_bytes
            entries.append(Entry(part.name, dtype, tuple(part.shape), part.first * part.row_bytes, start, size))
            end = start + size
        with self._progress:
            self.version, self.entries, self._filled = version, entries, 0
            self._progress.notify_all()
        if end > len(self._map):
            # The former one stays as long as bytes of it are being sent.
            self._map = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._map.madvise(mmap.MADV_DONTFORK)  # a forked writer of checkpoints would have it copied as it is filled
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def fill(self, tensors: Iterable[tuple[TensorRows, torch.Tensor]], checksums: Checksums | None = None) -> None:
        """Copy the planned parts (of any device and layout) in that order; each can be had once it is there.

        checksums: takes them in on the way. Raises ValueError when one is not as planned, or missing.
        """
        planned = iter(zip(self._parts, self.entries, strict=True))
        for part, tensor in tensors:
            expected, entry = next(planned, (None, None))
            if entry is None or part != expected or (tensor.dtype, tensor.shape) != (part.dtype, part.part_shape):
                given = f"{part.name} {tensor.dtype}{list(tensor.shape)}"
                raise ValueError(f"weights: {given}, as {part}, comes where {expected} was announced")
            place = self._place(entry, tensor)
            if checksums is None:
                place.copy_(tensor.detach())
            else:
                checksums.add(part.name, tensor, place, part.first)
            with self._progress:
                self._filled = entry.first + entry.size
                self._progress.notify_all()
            del tensor  # or it would stay while the next one is gathered
        if (missing := next(planned, None)) is not None:
            raise ValueError(f"weights: {missing[0].name} was announced, but did not come")

    def wait_for(self, version: int, end: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the bytes before `end` of `version`; returns whether they are there."""
        with self._progress:
            self._progress.wait_for(lambda: self.version != version or self._filled >= end, timeout_s)
            return self.version == version and self._filled >= end

    def content(self, first: int, size: int) -> memoryview:
        """`size` bytes from `first`. They outlive this object; later versions take their place."""
        return memoryview(self._map)[first : first + size]

    def close(self) -> None:
        """Release the memory, but for what is being sent."""
        self._map = mmap.mmap(-1, mmap.PAGESIZE)

    def _place(self, entry: Entry, tensor: torch.Tensor) -> torch.Tensor:
        if not entry.size:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        place = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=entry.first)
        return place.view(tensor.shape)


class _Strangers:
    """Connections that have not shown the secret: each new one has a place, and an older one may lose its own.

    The oldest of the address that has most of them leaves, so one host cannot keep the engines of others out. An engine
    on that host needs its place no longer than the secret travels.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[socket.socket, str] = {}  # in the order in which they came

    def add(self, peer: socket.socket, address: str) -> str:
        """Take one in; the address of the one that had to leave, or ""."""
        with self._lock:
            left = ""
            if len(self._addresses) >= _STRANGERS:
                left, _ = Counter(self._addresses.values()).most_common(1)[0]
                oldest = next(other for other, of in self._addresses.items() if of == left)
                del self._addresses[oldest]
                with suppress(OSError):  # it has just ended
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._addresses[peer] = address
            return left

    def discard(self, peer: socket.socket) -> bool:
        """It is none any more, or has ended; whether it was one still."""
        with self._lock:
            return self._addresses.pop(peer, None) is not None


class WeightServer:
    """Serves what a rank holds on one address, to who knows the secret.

    timeout_s: deadline of every operation on a connection.
    """

    def __init__(self, host: str, secret: bytes, timeout_s: float) -> None:
        self._socket = socket.create_server((host, 0), backlog=_CONNECTIONS, family=_family(host))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._secret, self._timeout_s = secret, timeout_s
        self._memory: WeightMemory | None = None
        self._lock = threading.Lock()
        self._strangers, self._free = _Strangers(), threading.BoundedSemaphore(_CONNECTIONS)
        self._refused, self._said_at = 0, -math.inf
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="weight server", daemon=True).start()

    def serve(self, memory: WeightMemory | None) -> None:
        """From now on what this holds, or nothing; ranges that are being sent are sent to their end."""
        with self._lock:
            self._memory = memory

    def close(self) -> None:
        """Serve nothing any more."""
        self.serve(None)
        self._closed.set()
        with suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, name = self._socket.accept()
            except OSError as error:
                if self._closed.wait(_ACCEPT_PAUSE_S):
                    return
                log.warning("weights: a connection was not accepted: %s", error)  # too many open files, say
                continue
            if left := self._strangers.add(peer, name[0]):
                self._refuse(left, f"{_STRANGERS} connections have not shown the secret of this run")
            threading.Thread(target=self._answer, args=(peer, name[0]), name="weights", daemon=True).start()

    def _answer(self, peer: socket.socket, address: str) -> None:
        known = False
        try:
            with peer:
                peer.settimeout(min(_SECRET_TIMEOUT_S, self._timeout_s))
                if not self._knows_secret(peer, address):
                    return
                known = self._free.acquire(blocking=False)
                if not known:
                    return self._refuse(address, f"{_CONNECTIONS} connections are open")
                peer.settimeout(self._timeout_s)
                self._serve(peer)
        except OSError as error:  # rank zero names the engine that is late or gone
            log.log(logging.INFO if known else logging.DEBUG, "weights: connection of %s ended: %s", address, error)
        finally:
            self._strangers.discard(peer)
            if known:
                self._free.release()

    def _knows_secret(self, peer: socket.socket, address: str) -> bool:
        secret = bytearray(SECRET_BYTES)
        receive(peer, memoryview(secret))
        if not hmac.compare_digest(secret, self._secret):
            self._refuse(address, "it does not know the secret of this run")
            return False
        return self._strangers.discard(peer)

    def _refuse(self, address: str, why: str) -> None:
        """Say so, but not of each: strangers are not to fill the log."""
        with self._lock:
            self._refused += 1
            if time.monotonic() < self._said_at + _REFUSALS_S:
                return
            count, self._refused, self._said_at = self._refused, 0, time.monotonic()
        log.warning("weights: %s refused, %s (%d since the last such line)", address, why, count)

    def _serve(self, peer: socket.socket) -> None:
        request = bytearray(REQUEST.size)
        while begun := peer.recv_into(request):
            receive(peer, memoryview(request)[begun:])
            version, first, length = REQUEST.unpack(request)
            memory = self._memory
            if memory is None or not memory.wait_for(version, first + length, self._timeout_s):
                return
            with self._lock:
                if self._memory is not memory:  # it may have been closed meanwhile
                    return
                content = memory.content(first, length)
            _send(peer, content)


def _send(peer: socket.socket, content: memoryview) -> None:
    """Send all of it; the time-out is for each part. Faster than sendfile, which copies page by page."""
    while content:
        content = content[peer.send(content) :]


@dataclass
class TcpOffer:
    """A `WeightOffer` that all ranks serve, of which some may still be copied; each rank closes its own."""

    version: int
    shares: Sequence[Share]
    secret: bytes = field(repr=False)
    settings: TransportSettings
    memory: WeightMemory = field(repr=False)
    source: WeightSource = field(repr=False)
    ranks: Ranks = field(repr=False)
    checksums: Checksums = field(repr=False)
    began: float
    kept: bool = True
    sums: Sums = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        entries = [entry for share in self.shares for entry in share.entries]
        self.names = frozenset(entry.name for entry in entries)
        self.size = sum(entry.size for entry in entries)

    @property
    def message(self) -> FetchMessage:
        """What an engine receives that fetches alone."""
        shares = [(share.host, share.port, share.entries) for share in self.shares]
        return FetchMessage(
            shares, self.secret.hex(), self.version, self.settings.bucket_bytes, self.settings.timeout_s
        )

    def begin(self, update: PendingUpdate) -> None:
        """See `WeightOffer`; engines may connect before there is anything to fetch, and begin at different tensors."""
        count = len(update.engines)
        update.tell(vars(self.message) | {"of": count}, [{"number": number} for number in range(count)])

    def transfer(self) -> None:
        """Copy what this rank sends, and exchange the checksums. Returns while engines still fetch."""
        self.memory.fill(self.source.own_weights(), self.checksums)
        self.sums.update(total_of(self.ranks.gather(self.checksums.sums)))

    def end(self) -> None:
        """The copy stays."""

    def close(self) -> None:
        """The next offer takes the memory over."""


class TcpTransport:
    """For engines on any node. A copy of what a rank sends stays in its node's memory until the next version."""

    def __init__(self, ranks: Ranks, facts: EngineFacts, settings: TransportSettings) -> None:
        """Agree on a secret, and begin to serve; collective. Ranks that are not on the node of `settings.address` serve
        on their address toward an engine's node."""
        self._ranks, self._facts, self._settings = ranks, facts, settings
        self._memory = WeightMemory()
        self._secret = ranks.on_rank_zero(lambda: secrets.token_bytes(SECRET_BYTES))
        host = own_address(settings.address, facts.address)
        self._server = WeightServer(host, self._secret, settings.timeout_s)

    def offer(self, source: WeightSource, version: int) -> TcpOffer:
        """See `WeightTransport`. The former version cannot be fetched any more."""
        began = time.monotonic()
        self._memory.plan(source.own_weight_rows(), version)
        self._server.serve(self._memory)
        shares = self._ranks.gather(Share(*self._server.address, self._memory.entries))
        return TcpOffer(
            version,
            [share for share in shares if share.entries],
            self._secret,
            self._settings,
            self._memory,
            source,
            self._ranks,
            Checksums(version, self._facts.dtype),
            began,
        )

    def close(self) -> None:
        """See `WeightTransport`."""
        self._server.close()
        self._memory.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]
