"""The transport over TCP on one rank: where it serves, what arrives, and what a record of an offer shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from ctpo_megatron.base.addresses import address_toward, is_own
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, WeightOffer, open_transport
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.tcp import SECRET_BYTES, FetchMessage, fetched
from ctpo_megatron.engines.weights.tcp_transport import TcpOffer
from tests.engines.pool_helpers import OneRank, Source

TENSORS = {"model.layers.0.weight": torch.randn(3, 4), "model.norm.weight": torch.randn(4)}
ELSEWHERE = "192.0.2.1"
"""Of no machine (RFC 5737)."""


class Engines:
    """Take what they are told, when they are asked to: a `PendingUpdate` of one engine."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}

    engines = ("an engine",)

    def tell(self, message: dict[str, Any], own: Sequence[dict[str, Any]]) -> None:
        self.message = message | own[0]

    def take(self, offer: WeightOffer) -> dict[str, torch.Tensor]:
        """What arrives; it has the checksums of the offer."""
        arriving = Checksums(offer.version, torch.float32)
        coming = arriving.watch(fetched(FetchMessage(**self.message)))
        taken = {name: tensor.clone() for name, tensor in coming}
        assert arriving.sums == offer.sums
        return taken


@pytest.fixture
def sent(request: pytest.FixtureRequest) -> Iterator[TcpOffer]:
    """What a transport offers, where `cluster.node_address` is the test's parameter."""
    settings = TransportSettings(64 << 10, 60.0, getattr(request, "param", None))
    transport = open_transport(OneRank(), EngineFacts(torch.float32, "127.0.0.1", "tcp"), settings)
    for version, added in ((3, 0), (4, 1)):
        tensors = {name: tensor + added for name, tensor in TENSORS.items()}
        engines: Any = Engines()
        offer = transport.offer(Source(tensors), version)
        assert isinstance(offer, TcpOffer) and offer.kept and offer.sums == {}  # nothing was copied yet
        assert offer.names == TENSORS.keys() and offer.size == sum(tensor.nbytes for tensor in TENSORS.values())
        offer.begin(engines)
        offer.transfer()
        for _ in range(2):  # the second time stands for an engine that starts later
            taken = engines.take(offer)
            assert all(torch.equal(taken[name], tensors[name]) for name in TENSORS)
        if version == 3:
            yield offer
    transport.close()


@pytest.mark.parametrize(
    ("sent", "host"), [("127.0.0.2", "127.0.0.2"), (ELSEWHERE, "127.0.0.1"), (None, "127.0.0.1")], indirect=["sent"]
)
def test_weights_are_served_at_the_nodes_address(sent: Any, host: str) -> None:
    """On other nodes than rank zero's `cluster.node_address` is nobody's: the address toward the engine is taken."""
    assert [share.host for share in sent.shares] == [host]


def test_the_secret_is_not_shown(sent: Any) -> None:
    assert len(sent.secret) == SECRET_BYTES
    for shown in (repr(sent), repr(sent.message)):
        assert "version=3" in shown
        assert sent.secret.hex() not in shown and repr(sent.secret) not in shown


def test_engines_are_told_their_number() -> None:
    class Four:
        engines = range(4)

        def __init__(self) -> None:
            self.told: list[FetchMessage] = []

        def tell(self, message: dict[str, Any], own: Sequence[dict[str, Any]]) -> None:
            self.told += [FetchMessage(**message | each) for each in own]

    facts = EngineFacts(torch.float32, "127.0.0.1", "tcp", workers=2)
    transport = open_transport(OneRank(), facts, TransportSettings(64 << 10, 60.0))
    update: Any = Four()
    transport.offer(Source(TENSORS), 1).begin(update)
    transport.close()
    assert [(each.number, each.of) for each in update.told] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_addresses_of_this_machine() -> None:
    assert address_toward("127.0.0.5") == "127.0.0.1" and address_toward("localhost") in ("127.0.0.1", "::1")
    assert is_own("127.0.0.5") and is_own("::1") and not is_own(ELSEWHERE) and not is_own("2001:db8::1")
