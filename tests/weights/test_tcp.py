"""The transport over TCP without engines: what arrives, who is refused, each deadline."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.base.addresses import address_toward, is_own
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, open_transport, tcp
from ctpo_megatron.engines.weights.checksums import Checksums, Sums
from ctpo_megatron.engines.weights.tcp import SECRET_BYTES, FetchMessage, fetched
from tests.support.deadlines import scaled
from tests.weights.sides import ONE_RANK, Tensors, manifest_of

ELSEWHERE = "192.0.2.1"
"""Of no machine (RFC 5737)."""
TENSORS = {
    "model.embed_tokens.weight": torch.randn(50, 8),
    "model.layers.0.a.weight": torch.randn(3, 5).bfloat16(),
    "model.layers.0.b.weight": torch.randn(7),
    "model.layers.1.a.weight": torch.randn(3, 5).bfloat16(),  # at an odd place for float32, which follows
    "model.layers.1.b.weight": torch.randn(4, 4).T,
    "model.layers.1.c.weight": torch.randn(0, 4),
    "scalar": torch.tensor(3.5),
}


class Trainer:
    """One rank that serves; `message` is what it has announced last."""

    def __init__(self, bucket_bytes: int = 300, timeout_s: float = 5.0, address: str | None = None) -> None:
        settings = TransportSettings(bucket_bytes, scaled(timeout_s), address)
        facts = EngineFacts(torch.float32, "127.0.0.1", "tcp")
        self.transport = open_transport(ONE_RANK, facts, settings, manifest_of(TENSORS), None)
        self.announce(4)

    def announce(self, version: int) -> None:
        self.message = FetchMessage(**self.transport.announce(version) or {})
        self.address = self.message.servers[0]

    def send(self, tensors: Any = TENSORS) -> Sums:
        return self.transport.send(tensors.items() if isinstance(tensors, dict) else tensors, self.message.version)

    def fetch(self, **changes: Any) -> Tensors:
        """What an engine gets that is told something else."""
        return dict(fetched(replace(self.message, **changes)))


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.transport.close()


def same(found: Tensors, expected: Tensors = TENSORS) -> bool:
    return list(found) == list(expected) and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def serving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def wait_until(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + scaled(10)
    while not seen() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen()


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20, 1 << 40])
def test_every_tensor_arrives_as_often_as_it_is_asked_for(bucket_bytes: int) -> None:
    """And no more memory is taken than a bucket carries."""
    trainer = Trainer(bucket_bytes)
    sums, received = trainer.send(), Checksums()
    for _ in range(2):
        assert same(trainer.fetch())
    list(received.watch(fetched(trainer.message)))
    assert received.sums() == sums
    trainer.transport.close()


def test_the_next_version_takes_the_memory_over(trainer: Trainer) -> None:
    trainer.send()
    for version in (5, 6):
        trainer.announce(version)
        later = {name: tensor + version for name, tensor in TENSORS.items()}
        trainer.send(later)
        assert same(trainer.fetch(), later)
        with pytest.raises(ConnectionError, match=rf"version {version - 1}: closed by the other side"):
            trainer.fetch(version=version - 1)


def test_a_forked_process_does_not_get_the_copy() -> None:
    trainer = Trainer()
    trainer.send()
    pages = trainer.transport._server._copy._maps[0]  # type: ignore[attr-defined]
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    smaps = Path("/proc/self/smaps").read_text()
    flags = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: ([a-z ]+)$", smaps, re.M | re.S)
    (found,) = [names.split() for first, end, names in flags if int(first, 16) <= address < int(end, 16)]
    assert "dc" in found  # "do not copy on fork"
    trainer.transport.close()


def test_an_engine_fetches_what_is_there_while_the_rest_is_copied(trainer: Trainer) -> None:
    first, *rest = TENSORS
    arrived, found = threading.Event(), Tensors()

    def engine() -> None:
        for name, tensor in fetched(trainer.message):
            found[name] = tensor
            arrived.set()

    def copied() -> Iterator[tuple[str, torch.Tensor]]:
        yield first, TENSORS[first]
        yield rest[0], TENSORS[rest[0]]  # another bucket: the first is complete
        assert arrived.wait(scaled(5))
        time.sleep(0.2)  # whatever it could have, it has by now
        assert list(found) == [first]
        yield from ((name, TENSORS[name]) for name in rest[1:])

    thread = threading.Thread(target=engine)
    thread.start()
    trainer.send(copied())
    thread.join(scaled(10))
    assert same(found)


def test_the_next_bucket_comes_while_one_is_used(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them, and not all: an engine does not hold two models."""
    trainer.send()
    received, receive = list[int](), tcp._receive

    def counting(peer: socket.socket, into: memoryview, portion: int = 1) -> None:
        receive(peer, into, portion)
        received.extend([len(into)] * (portion > 1))

    monkeypatch.setattr(tcp, "_receive", counting)
    coming = fetched(trainer.message)
    assert next(coming)[0] == next(iter(TENSORS))
    wait_until(lambda: len(received) == 2)
    time.sleep(0.2)
    assert len(received) == 2
    assert [name for name, _ in coming] == list(TENSORS)[1:]


def test_an_engine_that_stops_early_leaves_no_thread(trainer: Trainer) -> None:
    coming = fetched(trainer.message)
    sender = threading.Timer(0.1, lambda: trainer.send())
    sender.start()
    next(coming)
    coming.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights_")]
    sender.join()


@pytest.mark.parametrize("how", ["dtype", "shape", "name", "twice", "missing"])
def test_other_tensors_than_were_announced_are_refused(trainer: Trainer, how: str) -> None:
    """An engine that is fetching them gets an error."""
    name = "model.layers.0.b.weight"
    tensors = list(TENSORS.items())
    given, message = {
        "dtype": ([*tensors[:2], (name, TENSORS[name].half())], rf"{name} torch.float16\[7\] came, of which"),
        "shape": ([*tensors[:2], (name, TENSORS[name][1:])], rf"{name} torch.float32\[6\] came, of which"),
        "name": ([*tensors[:2], ("other", TENSORS[name])], r"other torch.float32\[7\] came, which the model does not"),
        "twice": ([*tensors, tensors[0]], f"{tensors[0][0]} came twice"),
        "missing": (tensors[1:], f"1 tensors were announced, but did not come, e.g. {tensors[0][0]}"),
    }[how]
    with pytest.raises(ValueError, match=message):
        trainer.send(given)
    if how != "missing":
        with pytest.raises(ConnectionError, match="closed by the other side"):
            trainer.fetch()


def test_stages_are_fetched_one_after_the_other(trainer: Trainer) -> None:
    trainer.send()
    other = Trainer()
    other.send()
    with pytest.raises(ConnectionError):  # each has a secret of its own
        trainer.fetch(servers=[trainer.address, other.address])
    other.transport.close()
    twice = [name for name, _ in fetched(replace(trainer.message, servers=[trainer.address] * 2))]
    assert twice == [*TENSORS] * 2


def test_who_does_not_know_the_secret_gets_nothing(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer.send()
    right = bytes.fromhex(trainer.message.secret)
    for secret in (bytes(SECRET_BYTES), right[:-1] + bytes([right[-1] ^ 1])):
        with socket.create_connection(trainer.address, timeout=scaled(5)) as peer:
            peer.sendall(secret)
            assert peer.recv(1) == b""
        with pytest.raises(ConnectionError, match=rf"weights of 127\.0\.0\.1:{trainer.address[1]}"):
            trainer.fetch(secret=secret.hex())
    wait_until(lambda: not serving())
    assert caplog.text.count("127.0.0.1 refused, it does not know the secret of this run") == 4
    assert trainer.message.secret not in caplog.text


def test_the_secret_is_not_shown(trainer: Trainer) -> None:
    assert len(bytes.fromhex(trainer.message.secret)) == SECRET_BYTES
    assert "version=4" in repr(trainer.message) and trainer.message.secret not in repr(trainer.message)


@pytest.mark.parametrize("sent", [0, 1, SECRET_BYTES - 1])
def test_who_does_not_send_the_secret_in_time_is_left(
    trainer: Trainer, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_SECRET_TIMEOUT_S", 0.3)
    trainer.send()
    with socket.create_connection(trainer.address, timeout=scaled(5)) as peer:
        peer.sendall(bytes.fromhex(trainer.message.secret)[:sent])
        assert same(trainer.fetch())  # others do not wait for it
        assert peer.recv(1) == b""


def test_a_rank_that_is_late_or_gone_is_named(trainer: Trainer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = mute.getsockname()
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=rf"weights of 127\.0\.0\.1:{address[1]}, version 4: timed out"):
            trainer.fetch(servers=[address], timeout_s=0.3)
        assert time.monotonic() - began < scaled(5)
    with pytest.raises(ConnectionError, match=rf"weights of 127\.0\.0\.1:{address[1]}, version 4: .*refused"):
        trainer.fetch(servers=[address])


def test_a_rank_that_does_not_go_on_copying_is_named() -> None:
    trainer = Trainer(timeout_s=0.3)
    with pytest.raises(ConnectionError, match=r"version 4: (closed by the other side|timed out)"):
        trainer.fetch()
    trainer.transport.close()


def test_a_receiver_that_stops_reading_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ctpo_megatron.engines.weights.tcp")
    big = {"big": torch.zeros(16 << 20)}  # more than the buffers of a connection
    settings = TransportSettings(1 << 20, 0.3)
    facts = EngineFacts(torch.float32, "127.0.0.1", "tcp")
    transport = open_transport(ONE_RANK, facts, settings, manifest_of(big), None)
    message = FetchMessage(**transport.announce(1) or {})
    transport.send(big.items(), 1)
    with socket.create_connection(message.servers[0]) as peer:
        peer.sendall(bytes.fromhex(message.secret) + (1).to_bytes(8))
        peer.recv(1)
        wait_until(lambda: not serving())
    assert [record.message for record in caplog.records] == ["weights: connection of 127.0.0.1 ended: timed out"]
    transport.close()


def test_an_engine_that_has_everything_leaves_without_a_word(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer.send()
    trainer.fetch()
    wait_until(lambda: not serving())
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("address", "host"), [("127.0.0.2", "127.0.0.2"), (ELSEWHERE, "127.0.0.1"), (None, "127.0.0.1")]
)
def test_weights_are_served_at_the_nodes_address_only(address: str | None, host: str) -> None:
    """`cluster.node_address` is rank zero's: ranks on other nodes serve on their address toward the engine."""
    trainer = Trainer(address=address)
    assert trainer.address[0] == host
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.3", trainer.address[1]), timeout=scaled(5))
    trainer.transport.close()
    with pytest.raises(ConnectionError, match="refused"):
        trainer.fetch()


def test_addresses_of_this_machine() -> None:
    assert address_toward("127.0.0.5") == "127.0.0.1" and address_toward("localhost") in ("127.0.0.1", "::1")
    assert is_own("127.0.0.5") and is_own("::1") and not is_own(ELSEWHERE) and not is_own("2001:db8::1")
