"""The transport over TCP on one rank, with a fleet that records: where it serves, and what its records show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctpo_megatron.base.addresses import address_toward, is_own
from ctpo_megatron.engines.weights import EngineFacts, EngineWeights
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.tcp import SECRET_BYTES, Offer, Share, fetched
from ctpo_megatron.run.transports import make_transport
from tests.engines.pool_helpers import OneRank, Source, make_config

TENSORS = {"model.layers.0.weight": torch.randn(3, 4), "model.norm.weight": torch.randn(4)}
ELSEWHERE = "192.0.2.1"
"""Of no machine (RFC 5737)."""


class Fleet:
    """Takes what it is given; an engine that comes up later takes what there was last, before it is said to be up."""

    transport = "tcp"

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.taken: list[dict[str, torch.Tensor]] = []

    def engine_facts(self) -> EngineFacts:
        if self.updates:
            self._take()
        return EngineFacts(torch.float32, "127.0.0.1")

    def begin_update(self, weights: EngineWeights, began: float) -> None:
        assert weights.sums == {}  # nothing was copied yet
        self.updates.append(weights)

    def finish_update(self) -> None:
        if self.updates:
            self._take()

    def _take(self) -> None:
        arriving = Checksums(self.updates[-1].version, torch.float32)
        with self.updates[-1].offered() as offer:
            shares = [Share(*share) for share in offer["shares"]]
            more = bytes.fromhex(offer["secret"]), offer["version"], offer["bucket_bytes"], offer["timeout_s"]
            self.taken.append(dict(arriving.watch(fetched(shares, *more))))
        assert arriving.sums == self.updates[-1].sums


@pytest.fixture
def sent(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The weights that a run's transport gives its fleet, where `cluster.node_address` is the test's parameter."""
    address = getattr(request, "param", None)
    config = make_config(tmp_path, tmp_path, sections={"cluster": {"node_address": address}})
    ranks: Any = OneRank()
    fleet = Fleet()
    services: Any = SimpleNamespace(pool=fleet, rollouts=None)
    transport = make_transport(ranks, services, config)
    transport.init()
    transport.send(Source(TENSORS), 3)
    [weights] = fleet.updates
    yield weights
    transport.send(Source({name: tensor + 1 for name, tensor in TENSORS.items()}), 4)
    fleet.finish_update()
    transport.close()
    for taken, added in zip(fleet.taken, (0, 0, 1), strict=True):
        assert all(torch.equal(taken[name], TENSORS[name] + added) for name in TENSORS)


@pytest.mark.parametrize(
    ("sent", "host"), [("127.0.0.2", "127.0.0.2"), (ELSEWHERE, "127.0.0.1"), (None, "127.0.0.1")], indirect=["sent"]
)
def test_weights_are_served_at_the_nodes_address(sent: Any, host: str) -> None:
    """On other nodes than rank zero's `cluster.node_address` is nobody's: the address toward the engine is taken."""
    assert [share.host for share in sent.shares] == [host]


def test_the_log_names_the_transport(caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> None:
    caplog.set_level("INFO")
    request.getfixturevalue("sent")
    assert "weights go to the engines by tcp (rollout.weights.transport: auto)" in caplog.messages


def test_the_secret_is_not_shown(sent: Any) -> None:
    assert len(sent.secret) == SECRET_BYTES
    with sent.offered() as offer:
        for shown in (repr(sent), repr(Offer(**offer))):
            assert "version=3" in shown
            assert sent.secret.hex() not in shown and repr(sent.secret) not in shown


def test_addresses_of_this_machine() -> None:
    assert address_toward("127.0.0.5") == "127.0.0.1" and address_toward("localhost") in ("127.0.0.1", "::1")
    assert is_own("127.0.0.5") and is_own("::1") and not is_own(ELSEWHERE) and not is_own("2001:db8::1")
