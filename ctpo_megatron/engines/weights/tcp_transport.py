"""The transport over TCP: every rank holds a copy of what it owns and serves it; rank zero tells the engines."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctpo_megatron.base.addresses import own_address
from ctpo_megatron.engines.weights.checksums import Checksums, Sums
from ctpo_megatron.engines.weights.memory import WeightMemory
from ctpo_megatron.engines.weights.offer import EngineFacts, Ranks, TransportSettings, WeightSource
from ctpo_megatron.engines.weights.tcp import SECRET_BYTES, FetchMessage, Share, WeightServer

if TYPE_CHECKING:
    from ctpo_megatron.engines.updates import PendingUpdate


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
        self.names = frozenset(entry[0] for entry in entries)
        self.size = sum(entry[4] for entry in entries)

    @property
    def message(self) -> FetchMessage:
        """What an engine is told."""
        shares = [(share.host, share.port, share.entries) for share in self.shares]
        return FetchMessage(
            shares, self.secret.hex(), self.version, self.settings.bucket_bytes, self.settings.timeout_s
        )

    def begin(self, update: PendingUpdate) -> None:
        """See `WeightOffer`; engines may connect before there is anything to fetch."""
        update.tell(vars(self.message))

    def transfer(self) -> None:
        """Copy what this rank owns, and exchange the checksums. Returns while engines still fetch."""
        self.memory.fill(self.source.own_weights(), self.checksums)
        for sums in self.ranks.gather(self.checksums.sums):
            self.sums.update(sums)

    def end(self) -> None:
        """The copy stays."""

    def close(self) -> None:
        """The next offer takes the memory over."""


class TcpTransport:
    """For engines on any node. A copy of what a rank owns stays in its node's memory until the next version."""

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
        self._memory.plan(source.own_weight_shapes(), version)
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
