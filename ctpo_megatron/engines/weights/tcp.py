"""Weights over TCP: the first rank of each pipeline stage serves a copy of its tensors, and every engine fetches it.

An engine sends the run's secret and a version. The rank answers with buckets of whole tensors, each as soon as it has
been copied. A bucket is the length of a JSON list, the list of names, dtypes and shapes, and the bytes of the tensors.
A length of zero ends the version. There is no encryption; the network has to be private.
"""

from __future__ import annotations

import hmac
import itertools
import json
import logging
import mmap
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ctpo_megatron.base.addresses import own_address
from ctpo_megatron.engines.weights.checksums import Checksums, Sums
from ctpo_megatron.engines.weights.transport import EngineFacts, Manifest, TransportSettings, WeightTransport

if TYPE_CHECKING:
    from ctpo_megatron.policy import Layout

log = logging.getLogger(__name__)

SECRET_BYTES = 32
_NUMBER = struct.Struct("!Q")
"""A version, or the length of a list."""
_ALIGNED = 64
"""Every tensor begins at a multiple of this many bytes of its bucket."""
_PORTION = 1 << 20
"""SO_RCVLOWAT: wake the receiver once per MiB, not per packet."""
_SECRET_TIMEOUT_S = 10.0
"""For a connection to send the secret."""
Listed = list[tuple[str, str, list[int]]]
"""Name, dtype as torch names it, and shape of each tensor of a bucket."""


class TcpTransport(WeightTransport):
    """For engines on any node, this one included. A copy stays in the memory of a serving rank's node."""

    by_stage = True

    def __init__(self, ranks: Layout, facts: EngineFacts, settings: TransportSettings, manifest: Manifest) -> None:
        """Agree on a secret, and begin to serve; collective. Ranks that are not on the node of `settings.address` serve
        on their address toward an engine's node."""
        self._ranks, self._settings, self._manifest = ranks, settings, manifest
        stages = ranks.gather(ranks.pp_rank)
        secret = ranks.on_rank_zero(lambda: secrets.token_bytes(SECRET_BYTES))
        self._secret, self._server = secret.hex(), None
        if stages.index(ranks.pp_rank) == ranks.rank:
            host, bucket_bytes = own_address(settings.address, facts.address), settings.bucket_bytes
            bucket_bytes = min(bucket_bytes, sum(size + _ALIGNED for size in manifest.sizes))
            self._server = WeightServer(host, secret, bucket_bytes, settings.timeout_s)

    def announce(self, version: int) -> dict[str, Any]:
        """See `WeightTransport`; when this returns, every serving rank waits for engines."""
        if self._server is not None:
            self._server.begin(version)
        servers = self._ranks.gather(None if self._server is None else self._server.address)
        addresses = [address for address in servers if address is not None]
        return vars(FetchMessage(addresses, self._secret, version, self._settings.timeout_s))

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Sums:
        """See `WeightTransport`; engines fetch meanwhile, and afterwards."""
        checksums = Checksums()
        try:
            for name, tensor in self._manifest.checked(tensors):
                if self._server is not None:
                    checksums.add(name, self._server.copy(name, tensor))
                del tensor  # or it would stay while the next one is gathered
            if self._server is not None:
                self._server.complete()
        except BaseException:
            if self._server is not None:
                self._server.begin(-1)
            raise
        stages = self._ranks.gather(checksums.sums())
        sums = {name: value for stage in stages for name, value in stage.items()}
        self._manifest.check_complete(sums)
        return sums

    def close(self) -> None:
        """See `WeightTransport`."""
        if self._server is not None:
            self._server.close()


class _Copy:
    """Buckets of one version, in pages that the next version takes again: faulting in new ones costs more time.

    One thread fills; others wait for buckets.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._maps: list[mmap.mmap] = []
        self._changed = threading.Condition()
        self._listed: Listed = []
        self._used = 0
        self._complete: list[tuple[bytes, memoryview]] = []
        self._version = -1

    def begin(self, version: int) -> None:
        """Forget what is here; -1: nothing comes."""
        self._listed, self._used = [], 0
        with self._changed:
            self._version, self._complete = version, []
            self._changed.notify_all()

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of any device and layout behind the others; returns the copy."""
        start = -(-self._used // _ALIGNED) * _ALIGNED
        if self._listed and start + tensor.nbytes > self._bucket_bytes:
            self._publish()
            start = 0
        self._listed.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        self._used = start + tensor.nbytes
        pages = self._pages(len(self._complete), self._used)
        if not tensor.nbytes:
            return tensor
        copy = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        return copy.copy_(tensor.detach())

    def complete(self) -> None:
        """Note that the version has no more tensors."""
        if self._listed:
            self._publish()
        self._append(b"", memoryview(b""))

    def bucket(self, version: int, number: int, timeout_s: float) -> tuple[bytes, memoryview] | None:
        """Wait for a bucket: its list, which is empty after the last one, and its bytes. None: it does not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version or len(self._complete) > number, timeout_s)
            return self._complete[number] if self._version == version and len(self._complete) > number else None

    def _publish(self) -> None:
        pages = self._maps[len(self._complete)]
        self._append(json.dumps(self._listed).encode(), memoryview(pages)[: self._used])
        self._listed, self._used = [], 0

    def _append(self, listed: bytes, content: memoryview) -> None:
        with self._changed:
            self._complete.append((listed, content))
            self._changed.notify_all()

    def _pages(self, number: int, size: int) -> mmap.mmap:
        size = max(size, self._bucket_bytes)
        if number == len(self._maps):
            self._maps.append(_mapped(size))
        if len(self._maps[number]) < size:
            self._maps[number] = _mapped(size)  # the former one stays as long as bytes of it are sent
        return self._maps[number]


def _mapped(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # a forked writer of checkpoints would have it copied as it is filled
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _sizes(listed: Sequence[Sequence[Any]]) -> tuple[list[tuple[int, int]], int]:
    """Return where each tensor of a bucket begins and how many bytes it has, and the bytes of the bucket."""
    places, end = [], 0
    for _, dtype, shape in listed:
        start = -(-end // _ALIGNED) * _ALIGNED
        end = start + getattr(torch, dtype).itemsize * torch.Size(shape).numel()
        places.append((start, end - start))
    return places, end


class WeightServer(socketserver.ThreadingTCPServer):
    """Serves the copy of a rank on one address, to who knows the secret.

    timeout_s: deadline of every operation on a connection.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, host: str, secret: bytes, bucket_bytes: int, timeout_s: float) -> None:
        self.address_family = socket.getaddrinfo(host, None)[0][0]
        super().__init__((host, 0), socketserver.BaseRequestHandler)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        self._secret, self._timeout_s = secret, timeout_s
        self._copy = _Copy(bucket_bytes)
        self.begin, self.copy, self.complete = self._copy.begin, self._copy.add, self._copy.complete
        threading.Thread(target=self.serve_forever, name="weight server", daemon=True).start()

    def close(self) -> None:
        """Serve nothing any more."""
        self.begin(-1)
        self.shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, in a thread of its own."""
        request.settimeout(min(_SECRET_TIMEOUT_S, self._timeout_s))
        try:
            if hmac.compare_digest(_received(request, SECRET_BYTES), self._secret):
                request.settimeout(self._timeout_s)
                self._serve(request)
            else:
                log.warning("weights: %s refused, it does not know the secret of this run", client_address[0])
        except OSError as error:  # rank zero names the engine that is late or gone
            log.info("weights: connection of %s ended: %s", client_address[0], error)

    def _serve(self, peer: socket.socket) -> None:
        (version,) = _NUMBER.unpack(_received(peer, _NUMBER.size))
        for number in itertools.count():
            bucket = self._copy.bucket(version, number, self._timeout_s)
            if bucket is None:
                return
            listed, content = bucket
            _send(peer, memoryview(_NUMBER.pack(len(listed)) + listed))
            _send(peer, content)
            if not listed:
                return


@dataclass
class FetchMessage:
    """What an engine needs in order to fetch. servers: host and port of each stage. secret: in hexadecimal digits."""

    servers: Sequence[tuple[str, int]]
    secret: str = field(repr=False)
    version: int
    timeout_s: float


def fetched(message: FetchMessage) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor on the CPU) of all stages; a bucket arrives while the one before is used.

    timeout_s: of every operation on a connection. Raises ConnectionError naming the address of a rank that is late or
    gone, does not have this version, or refuses the secret.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="weights"))
        source = stack.enter_context(_Source(message))  # it ends before the pool, whose thread waits for bytes
        buckets = source.buckets()
        coming = pool.submit(next, buckets, None)
        while (bucket := coming.result()) is not None:
            coming = pool.submit(next, buckets, None)
            listed, content = bucket
            for (name, dtype, shape), (start, size) in zip(listed, _sizes(listed)[0], strict=True):
                yield name, content[start : start + size].view(getattr(torch, dtype)).view(shape)
            del content, bucket


class _Source:
    """An engine's connection to one stage after the other."""

    def __init__(self, message: FetchMessage) -> None:
        self._message = message
        self._peer: socket.socket | None = None

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        if self._peer is not None:
            with suppress(OSError):  # closed before
                self._peer.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for what is no longer needed

    def buckets(self) -> Iterator[tuple[Listed, torch.Tensor]]:
        """Yield the tensors of each bucket, and its bytes."""
        for host, port in self._message.servers:
            try:
                yield from self._of_stage(host, port)
            except OSError as error:
                what = f"weights of {host}:{port}, version {self._message.version}"
                raise ConnectionError(f"{what}: {error}") from error

    def _of_stage(self, host: str, port: int) -> Iterator[tuple[Listed, torch.Tensor]]:
        message = self._message
        with socket.create_connection((host, port), timeout=message.timeout_s) as self._peer:
            self._peer.sendall(bytes.fromhex(message.secret) + _NUMBER.pack(message.version))
            while (length := _NUMBER.unpack(_received(self._peer, _NUMBER.size))[0]) > 0:
                listed: Listed = json.loads(_received(self._peer, length))
                content = torch.empty(_sizes(listed)[1], dtype=torch.uint8)
                _receive(self._peer, content.numpy().data, _PORTION)
                yield listed, content


def _received(peer: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    _receive(peer, memoryview(content))
    return content


def _receive(peer: socket.socket, into: memoryview, portion: int = 1) -> None:
    """Fill `into`, in parts of `portion` bytes at least or of what is missing.

    Raises ConnectionError when the other side ends before, TimeoutError when a part is late.
    """
    while into:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(portion, len(into)))
        count = peer.recv_into(into)
        if count == 0:
            raise ConnectionError(f"closed by the other side, {len(into)} bytes short")
        into = into[count:]


def _send(peer: socket.socket, content: memoryview) -> None:
    """Send all of it; the time-out is for each part. Faster than sendfile, which copies page by page."""
    while content:
        content = content[peer.send(content) :]
