"""Weights over TCP between a server and a receiver, without engines: what arrives, who is refused, each deadline."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.base.tensor_rows import TensorRows
from ctpo_megatron.engines.weights.buckets import Entry, Share, plan
from ctpo_megatron.engines.weights.tcp import SECRET_BYTES, FetchMessage, fetched
from ctpo_megatron.engines.weights.tcp_transport import WeightMemory, WeightServer, _Strangers
from tests.support.deadlines import scaled

SECRET = bytes(range(SECRET_BYTES))
TENSORS = {
    "model.embed_tokens.weight": torch.randn(50, 8),
    "model.layers.0.a.weight": torch.randn(3, 5).bfloat16(),
    "model.layers.0.b.weight": torch.randn(7),
    "model.layers.1.a.weight": torch.randn(3, 5).bfloat16(),  # at an odd place for float32, which follows
    "model.layers.1.b.weight": torch.randn(4, 4),
    "model.layers.1.c.weight": torch.randn(0, 4),
    "scalar": torch.tensor(3.5),
}


@pytest.fixture
def server() -> Iterator[WeightServer]:
    server = WeightServer("127.0.0.1", SECRET, scaled(5))
    yield server
    server.close()


def held(tensors: dict[str, torch.Tensor], version: int = 4, memory: WeightMemory | None = None) -> WeightMemory:
    """Memory with a copy of whole tensors."""
    memory, parts = memory or WeightMemory(), rows(tensors)
    memory.plan(parts, version)
    memory.fill(zip(parts, tensors.values(), strict=True))
    return memory


def rows(tensors: dict[str, torch.Tensor]) -> list[TensorRows]:
    return [TensorRows.whole(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def share(server: WeightServer, names: list[str]) -> Share:
    memory = held({name: TENSORS[name] for name in names})
    server.serve(memory)
    return Share(*server.address, memory.entries)


def message(
    shares: list[Share], *, secret: bytes = SECRET, version: int = 4, bucket_bytes: int = 100, timeout_s: float = 5
) -> FetchMessage:
    fields = [(each.host, each.port, each.entries) for each in shares]
    return FetchMessage(fields, secret.hex(), version, bucket_bytes, scaled(timeout_s))


def fetch(shares: list[Share], **settings: Any) -> dict[str, torch.Tensor]:
    return dict(fetched(message(shares, **settings)))


def serving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weights"]


def wait_until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(10)
    while not seen() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_every_tensor_arrives_as_often_as_it_is_asked_for(server: WeightServer, bucket_bytes: int) -> None:
    offered = share(server, list(TENSORS))
    for _ in range(2):
        found = fetch([offered], bucket_bytes=bucket_bytes)
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_the_next_version_takes_the_memory_over(server: WeightServer) -> None:
    """Longer, then shorter: what is left of the former is not in the way."""
    memory = WeightMemory()
    for version, count in enumerate((3, 6, 1)):
        tensors = {name: TENSORS[name] + version for name in list(TENSORS)[:count]}
        server.serve(held(tensors, version, memory))
        found = fetch([Share(*server.address, memory.entries)], version=version)
        assert found.keys() == set(list(TENSORS)[:count])
        assert [entry.size for entry in memory.entries] == [tensor.nbytes for tensor in found.values()]
        assert all(torch.equal(tensor, TENSORS[name] + version) for name, tensor in found.items())
    memory.close()


def test_a_forked_process_does_not_get_the_copy() -> None:
    big = torch.zeros(1 << 20)
    memory = held({"big": big})
    address = torch.frombuffer(memory.content(0, big.nbytes), dtype=torch.float32).data_ptr()
    smaps = Path("/proc/self/smaps").read_text()
    flags = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: ([a-z ]+)$", smaps, re.M | re.S)
    (found,) = [names.split() for first, end, names in flags if int(first, 16) <= address < int(end, 16)]
    assert "dc" in found  # "do not copy on fork"


def test_an_engine_that_has_everything_leaves_without_a_word(
    server: WeightServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fetch([share(server, list(TENSORS))])
    wait_until(lambda: not serving())
    assert caplog.messages == []


def test_an_engine_fetches_what_is_there_while_the_rest_is_copied(server: WeightServer) -> None:
    memory, (first, *rest) = WeightMemory(), TENSORS
    memory.plan(rows(TENSORS), 4)
    server.serve(memory)
    arrived, found = threading.Event(), {}

    def engine() -> None:
        for name, tensor in fetched(message([Share(*server.address, memory.entries)], bucket_bytes=1)):
            found[name] = tensor
            arrived.set()

    def copied() -> Iterator[tuple[str, torch.Tensor]]:
        yield first, TENSORS[first]
        assert arrived.wait(scaled(5))
        time.sleep(0.2)  # whatever it could have, it has by now
        assert list(found) == [first]
        yield from ((name, TENSORS[name]) for name in rest)

    thread = threading.Thread(target=engine)
    thread.start()
    memory.fill(zip(rows(TENSORS), (tensor for _, tensor in copied()), strict=True))
    thread.join(scaled(10))
    assert found.keys() == TENSORS.keys() and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_the_next_bucket_comes_while_one_is_used(server: WeightServer) -> None:
    asked: list[int] = []

    class Watched(WeightMemory):
        def content(self, first: int, size: int) -> memoryview:
            asked.append(first)
            return super().content(first, size)

    memory, names = held(TENSORS, memory=Watched()), list(TENSORS)
    server.serve(memory)
    coming = fetched(message([Share(*server.address, memory.entries)], bucket_bytes=1))
    assert next(coming)[0] == names[0]
    wait_until(lambda: len(asked) == 2)
    assert sorted(asked) == [entry.first for entry in memory.entries[:2]]  # each over a connection of its own
    server.serve(None)
    name, tensor = next(coming)
    assert name == names[1] and torch.equal(tensor, TENSORS[name])
    with pytest.raises(ConnectionError, match="closed by the other side"):
        next(coming)


def test_a_rank_that_does_not_go_on_copying_is_named() -> None:
    server, memory = WeightServer("127.0.0.1", SECRET, 0.3), WeightMemory()
    try:
        memory.plan(rows(TENSORS), 4)
        server.serve(memory)
        with pytest.raises(ConnectionError, match=r"version 4: (closed by the other side|timed out)"):
            fetch([Share(*server.address, memory.entries)])
    finally:
        server.close()


def test_a_bucket_takes_no_more_memory_than_it_carries(server: WeightServer) -> None:
    name = next(iter(TENSORS))
    assert torch.equal(fetch([share(server, [name])], bucket_bytes=1 << 50)[name], TENSORS[name])


def test_memory_of_a_bucket_is_used_again_once_nobody_uses_it(server: WeightServer) -> None:
    tensors = {f"layers.{n}": torch.full((1024,), float(n)) for n in range(40)}
    memory = held(tensors)
    server.serve(memory)
    kept, places = {}, set()
    coming = fetched(message([Share(*server.address, memory.entries)], bucket_bytes=4096))
    for number, (name, tensor) in enumerate(coming):
        assert torch.equal(tensor, tensors[name])
        places.add(tensor.data_ptr())
        if number % 10 == 0:
            kept[name] = tensor
        del tensor
    assert len(places) <= len(kept) + 3  # those kept, the one in use, and two on their way
    assert len(kept) == 4 and all(torch.equal(tensor, tensors[name]) for name, tensor in kept.items())


def test_other_tensors_than_were_announced_are_refused() -> None:
    memory, (name, tensor) = WeightMemory(), next(iter(TENSORS.items()))
    (whole,) = rows({name: tensor})
    for given, message in (
        ([(whole, tensor.bfloat16())], rf"{name} torch.bfloat16\[50, 8\], as .* comes where .*{name}"),
        ([(whole, tensor[1:])], rf"{name} torch.float32\[49, 8\], as .* comes where .*{name}"),
        ([(whole._replace(first=1, rows=49), tensor[1:])], "first=1, rows=49.* comes where .*first=0, rows=50"),
        ([(whole._replace(name="other"), tensor)], "other torch.float32"),
        ([(whole, tensor), (whole._replace(name="another"), tensor)], "another .* comes where None"),
        ([], f"{name} was announced, but did not come"),
    ):
        memory.plan([whole], 4)
        with pytest.raises(ValueError, match=message):
            memory.fill(given)


def test_several_engines_fetch_at_once(server: WeightServer) -> None:
    offered = share(server, list(TENSORS))
    found: list[dict[str, torch.Tensor]] = []
    engines = [threading.Thread(target=lambda: found.append(fetch([offered]))) for _ in range(4)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join(scaled(10))
    assert [len(of_engine) for of_engine in found] == [len(TENSORS)] * 4


def test_layers_come_one_after_another_from_all_ranks(server: WeightServer) -> None:
    other = WeightServer("127.0.0.1", SECRET, scaled(5))
    try:
        names = sorted(TENSORS)
        shares = [share(server, names[::2]), share(other, names[1::2])]
        found = fetch(shares, bucket_bytes=1 << 20)
        layers = [int(name.split(".")[2]) for name in found if "layers" in name]
        assert layers == sorted(layers) and found.keys() == TENSORS.keys()
        assert [name for name in found if "layers" not in name] == ["model.embed_tokens.weight", "scalar"]
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    finally:
        other.close()


def test_a_bucket_has_a_size(server: WeightServer) -> None:
    offered = share(server, list(TENSORS))
    buckets = plan([offered], 100)
    assert [len(bucket.tensors) for bucket in buckets] == [1, 2, 1, 3]
    assert all(bucket.size <= 100 or len(bucket.tensors) == 1 for bucket in buckets)
    assert [len(bucket.pieces) for bucket in buckets] == [1, 1, 1, 1]  # one request fetches all of a bucket


def test_who_does_not_know_the_secret_gets_nothing(server: WeightServer, caplog: pytest.LogCaptureFixture) -> None:
    offered = share(server, list(TENSORS))
    for secret in (bytes(SECRET_BYTES), SECRET[:-1] + b"x"):
        with socket.create_connection(server.address, timeout=scaled(5)) as peer:
            peer.sendall(secret)
            assert peer.recv(1) == b""
        with pytest.raises(ConnectionError, match=rf"weights of 127\.0\.0\.1:{server.address[1]}"):
            fetch([offered], secret=secret)
    wait_until(lambda: not serving())
    assert server._refused == 2 * (1 + 2) - 1  # an engine has two connections
    assert caplog.text.count("127.0.0.1 refused, it does not know the secret of this run (1 since") == 1
    assert SECRET.hex() not in caplog.text


def filled(server: WeightServer, count: int, sent: bytes) -> list[socket.socket]:
    """Connections that stay open without the secret."""
    peers = []
    for _ in range(count):
        peers.append(socket.create_connection(server.address, timeout=scaled(5)))
        peers[-1].sendall(sent)
    return peers


@pytest.mark.parametrize("sent", [b"", SECRET[:-1], b"x"])
def test_strangers_do_not_take_the_places_of_engines(
    server: WeightServer, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    offered = share(server, list(TENSORS))
    peers = filled(server, 600, sent)  # more than there are connections for engines
    try:
        assert fetch([offered]).keys() == TENSORS.keys()
        wait_until(lambda: len(serving()) <= 64)
        assert "64 connections have not shown the secret of this run" in caplog.text
        assert caplog.text.count("refused") == 1
    finally:
        for peer in peers:
            peer.close()


def test_a_host_with_many_strangers_keeps_no_other_out() -> None:
    """Not even an engine whose secret is late."""
    strangers = _Strangers()
    pairs = [socket.socketpair() for _ in range(200)]
    late, *others = [pair[0] for pair in pairs]
    assert strangers.add(late, "10.0.0.1") == ""
    left = [strangers.add(other, "10.0.0.2") for other in others]
    assert left == [""] * 63 + ["10.0.0.2"] * (199 - 63)
    assert strangers.discard(late) and not strangers.discard(others[0]) and strangers.discard(others[-1])
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_version_that_is_not_there_is_refused(server: WeightServer) -> None:
    offered = share(server, list(TENSORS))
    with pytest.raises(ConnectionError, match=r"version 5: closed by the other side"):
        fetch([offered], version=5)
    server.serve(None)
    with pytest.raises(ConnectionError, match=r"version 4: closed by the other side"):
        fetch([offered])


def test_a_rank_that_is_late_or_gone_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = mute.getsockname()
        offered = Share(*address, [Entry("a", "float32", (1,), 0, 0, 4)])
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=rf"weights of 127\.0\.0\.1:{address[1]}, version 4: timed out"):
            dict(fetched(dataclasses.replace(message([offered]), timeout_s=0.3)))
        assert time.monotonic() - began < scaled(5)
    with pytest.raises(ConnectionError, match=rf"weights of 127\.0\.0\.1:{address[1]}: .*refused"):
        fetch([offered])


def test_a_receiver_that_stops_reading_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ctpo_megatron.engines.weights.tcp_transport")
    server = WeightServer("127.0.0.1", SECRET, 0.3)
    try:
        big = {"big": torch.zeros(16 << 20)}  # more than the buffers of a connection
        server.serve(held(big, 1))
        with socket.create_connection(server.address) as peer:
            peer.sendall(SECRET + (1).to_bytes(8) + bytes(8) + big["big"].nbytes.to_bytes(8))
            peer.recv(1)
            wait_until(lambda: not serving())
        assert [record.message for record in caplog.records] == ["weights: connection of 127.0.0.1 ended: timed out"]
    finally:
        server.close()


def test_it_listens_on_the_named_address_only(server: WeightServer) -> None:
    assert server.address[0] == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", server.address[1]), timeout=scaled(5))


def test_a_closed_server_answers_nobody(server: WeightServer) -> None:
    offered = share(server, list(TENSORS))
    server.close()
    with pytest.raises(ConnectionError):
        fetch([offered])
