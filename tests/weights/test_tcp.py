"""Weights over TCP between a server and a receiver, without engines: what arrives, who is refused, each deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from ctpo_megatron.weights.memory import WeightMemory
from ctpo_megatron.weights.tcp import SECRET_BYTES, Share, WeightServer, fetched, plan
from tests.support.deadlines import scaled

SECRET = bytes(range(SECRET_BYTES))
TENSORS = {
    "model.embed_tokens.weight": torch.randn(50, 8),
    "model.layers.0.a.weight": torch.randn(3, 5).bfloat16(),
    "model.layers.0.b.weight": torch.randn(7),
    "model.layers.1.a.weight": torch.randn(3, 5).bfloat16(),  # at an odd place for float32, which follows
    "model.layers.1.b.weight": torch.randn(4, 4),
    "scalar": torch.tensor(3.5),
}


@pytest.fixture
def server() -> Iterator[WeightServer]:
    server = WeightServer("127.0.0.1", SECRET, scaled(5))
    yield server
    server.close()


def share(server: WeightServer, names: list[str], version: int = 4) -> Share:
    memory = WeightMemory()
    memory.fill([(name, TENSORS[name]) for name in names], version)
    server.serve(memory)
    return Share(*server.address, memory.entries)


def fetch(
    shares: list[Share], *, secret: bytes = SECRET, version: int = 4, bucket_bytes: int = 100, timeout_s: float = 5
):
    return dict(fetched(shares, secret, version, bucket_bytes, scaled(timeout_s)))


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
        server.serve(None)
        memory.fill(((name, TENSORS[name] + version) for name in list(TENSORS)[:count]), version)
        server.serve(memory)
        found = fetch([Share(*server.address, memory.entries)], version=version)
        assert found.keys() == set(list(TENSORS)[:count])
        assert memory.size == sum(tensor.nbytes for tensor in found.values())
        assert all(torch.equal(tensor, TENSORS[name] + version) for name, tensor in found.items())
    memory.close()


def test_an_engine_that_has_everything_leaves_without_a_word(
    server: WeightServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fetch([share(server, list(TENSORS))])
    for thread in threading.enumerate():
        if thread.name == "weights":
            thread.join(scaled(10))
    assert caplog.messages == []


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
        layers = [next((int(part) for part in name.split(".") if part.isdigit()), -1) for name in found]
        assert layers == sorted(layers) and found.keys() == TENSORS.keys()
        buckets = plan(shares, 1 << 20)
        assert len(buckets) == 6  # two ranks' parts of "no layer", layer 0, layer 1
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    finally:
        other.close()


def test_a_bucket_has_a_size(server: WeightServer) -> None:
    offered = share(server, list(TENSORS))
    buckets = plan([offered], 100)
    assert sorted(len(bucket.entries) for bucket in buckets) == [1, 1, 1, 3]
    assert all(bucket.size <= 100 or len(bucket.entries) == 1 for bucket in buckets)


def test_who_does_not_know_the_secret_gets_nothing(server: WeightServer, caplog: pytest.LogCaptureFixture) -> None:
    offered = share(server, list(TENSORS))
    for secret in (bytes(SECRET_BYTES), SECRET[:-1] + b"x"):
        with socket.create_connection(server.address, timeout=scaled(5)) as peer:
            peer.sendall(secret)
            assert peer.recv(1) == b""
        with pytest.raises(ConnectionError, match=rf"weights of 127\.0\.0\.1:{server.address[1]}"):
            fetch([offered], secret=secret)
    assert caplog.text.count("does not know the secret") == 4
    assert SECRET.hex() not in caplog.text


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
        offered = Share(*address, [("a", "float32", (1,), 0, 4)])
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=rf"weights of 127\.0\.0\.1:{address[1]}, version 4: timed out"):
            dict(fetched([offered], SECRET, 4, 100, 0.3))
        assert time.monotonic() - began < scaled(5)
    with pytest.raises(ConnectionError, match=rf"weights of 127\.0\.0\.1:{address[1]}: .*refused"):
        fetch([offered])


def serving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weights"]


def test_a_receiver_that_stops_reading_is_left() -> None:
    server = WeightServer("127.0.0.1", SECRET, 0.3)
    try:
        big = {"big": torch.zeros(16 << 20)}  # more than the buffers of a connection
        memory = WeightMemory()
        memory.fill(big.items(), 1)
        server.serve(memory)
        with socket.create_connection(server.address) as peer:
            peer.sendall(SECRET + (1).to_bytes(8) + bytes(8) + memory.size.to_bytes(8))
            peer.recv(1)
            deadline = time.monotonic() + scaled(5)
            while (
                threads := [t for t in threading.enumerate() if t.name == "weights"]
            ) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not threads
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
