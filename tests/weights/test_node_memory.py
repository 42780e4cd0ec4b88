"""Receivers of one node fetch every byte once: who takes over from whom, who is kept out, and what is left."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import node_weights
from benchmarks.node_weights import LinkedMemory
from ctpo_megatron.base.tensor_rows import TensorRows
from ctpo_megatron.engines.weights import node_memory
from ctpo_megatron.engines.weights.buckets import Entry, Share, plan
from ctpo_megatron.engines.weights.node_memory import NoMeetingError, meet
from ctpo_megatron.engines.weights.tcp import SECRET_BYTES, FetchMessage, fetched
from ctpo_megatron.engines.weights.tcp_transport import WeightServer
from tests.support import ranks
from tests.support.deadlines import scaled
from tests.support.prefork import Child
from tests.weights import node_scenario

SECRET = bytes(range(SECRET_BYTES))
TENSORS = {f"layers.{number}.weight": torch.full((8, 32), float(number)) for number in range(6)}
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())


class Node:
    """A rank that has `TENSORS`, as receivers of one node see it."""

    def __init__(self) -> None:
        self.memory, rows = LinkedMemory(), [TensorRows.whole(n, tuple(t.shape), t.dtype) for n, t in TENSORS.items()]
        self.memory.plan(rows, 1)
        self.memory.fill(zip(rows, TENSORS.values(), strict=True))
        self.server = WeightServer("127.0.0.1", SECRET, scaled(20))
        self.server.serve(self.memory)
        self.meeting = secrets.token_hex(8)
        self.sizes = [bucket.size for bucket in plan([Share(*self.server.address, self.memory.entries)], 1)]

    def fetch(self, timeout_s: float = 60.0) -> dict[str, torch.Tensor]:
        """As one of two receivers; copies."""
        entries: list[Entry] = self.memory.entries
        message = FetchMessage([(*self.server.address, entries)], SECRET.hex(), 1, 1, scaled(timeout_s))
        message.receivers, message.meeting = 2, self.meeting
        return {name: tensor.clone() for name, tensor in fetched(message)}


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.server.close()


def wait_until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(30)
    while not seen() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen()


def is_complete(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def memories() -> list[str]:
    """Memory of this kind that this process holds open."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return [target for link in links if link.is_symlink() and "memfd:ctpo-weights" in (target := os.readlink(link))]


def test_every_byte_is_fetched_once_for_four_receivers() -> None:
    """As for one. Time is not compared here: `benchmarks.node_weights` does that, on a machine without other work."""
    found = ranks.run(node_weights.job, 64, (1, 4), 2, ranks=5)[0]
    print(f"seconds for 64 MiB over loopback: {found['seconds']}")
    assert found["sent"] == {1: [64 << 20] * 2, 4: [64 << 20] * 2}


@pytest.fixture
def neighbour(node: Node, tmp_path: Path) -> Iterator[Child]:
    """Has begun to fetch two buckets, and made the memory."""
    claimed = tmp_path / "claimed"
    child = ranks.prefork().start(
        node_scenario.claim, node.meeting, node.sizes, [1, 4], claimed, output=tmp_path / "neighbour"
    )
    try:
        wait_until(claimed.exists)
        yield child
    finally:
        child.end()


def test_what_a_neighbour_had_begun_is_fetched_when_it_dies(node: Node, neighbour: Child) -> None:
    before = set(os.listdir("/dev/shm"))
    found: list[dict[str, torch.Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(node.fetch()))
    thread.start()
    wait_until(lambda: node.memory.requested == SIZE * 4 // 6)  # all but its two
    time.sleep(0.1)
    assert not found and node.memory.requested == SIZE * 4 // 6
    os.kill(neighbour.pid, 9)
    thread.join(scaled(5))  # less than the patience with one that lives
    assert is_complete(found[0]) and node.memory.requested == SIZE
    assert memories() == [] and set(os.listdir("/dev/shm")) <= before


def test_a_neighbour_that_does_not_go_on_delays_an_update_but_does_not_stop_it(node: Node, neighbour: Child) -> None:
    assert is_complete(node.fetch(timeout_s=2.0)) and node.memory.requested == SIZE
    assert neighbour.wait(0) is None


def test_a_late_neighbour_takes_all_from_memory(node: Node) -> None:
    assert is_complete(node.fetch()) and node.memory.requested == SIZE
    assert is_complete(node.fetch()) and node.memory.requested == SIZE
    wait_until(lambda: memories() == [])


def test_what_a_receiver_writes_to_a_tensor_stays_with_it(node: Node) -> None:
    message = FetchMessage([(*node.server.address, node.memory.entries)], SECRET.hex(), 1, 1, scaled(60))
    message.receivers, message.meeting = 2, node.meeting
    for _, tensor in fetched(message):
        tensor += 1.0
    assert is_complete(node.fetch()) and node.memory.requested == SIZE


def test_memory_is_not_kept_for_ever(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a neighbour that does not come."""
    monkeypatch.setattr(node_memory, "LATE_NEIGHBOUR_S", 0.2)
    assert is_complete(node.fetch())
    wait_until(lambda: memories() == [])
    assert is_complete(node.fetch()) and node.memory.requested == 2 * SIZE


def test_other_buckets_are_not_taken_for_these(node: Node) -> None:
    host = meet(node.meeting, [size * 2 for size in node.sizes], 2)
    with pytest.raises(NoMeetingError, match="a neighbour fetches other buckets"):
        meet(node.meeting, node.sizes, 2)
    host.close()


def test_without_a_meeting_each_fetches_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_memory, "MEETING_S", 0.3)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"\0ctpo-weights-{node.meeting}")
        assert is_complete(node.fetch()) and node.memory.requested == SIZE
    assert "weights 1 are fetched by each engine of this node: no answer of the receiver" in caplog.text


STRANGER = """
import os, socket, sys
os.setuid(65534)
how, address = sys.argv[1], "\\0" + sys.argv[2]
peer = socket.socket(socket.AF_UNIX)
if how == "asks":
    peer.connect(address)
    print(socket.recv_fds(peer, 1, 1)[:2], flush=True)
else:
    peer.bind(address)
    peer.listen()
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root")
@pytest.mark.parametrize("how", ["asks", "answers"])
def test_another_user_gets_nothing_and_is_not_believed(how: str, node: Node, caplog: pytest.LogCaptureFixture) -> None:
    host = meet(node.meeting, node.sizes, 2) if how == "asks" else None
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER, how, f"ctpo-weights-{node.meeting}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stranger.stdout is not None
    try:
        assert stranger.stdout.readline().strip() == ("there" if host is None else "(b'', [])")
        assert is_complete(node.fetch()) and node.memory.requested == SIZE
        assert ("user 65534 has the name" in caplog.text) == (host is None)
    finally:
        stranger.kill()
        stranger.communicate()
        if host is not None:
            host.close()
