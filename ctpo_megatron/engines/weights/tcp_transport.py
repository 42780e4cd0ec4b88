"""The transport over TCP: every rank holds a copy of what it owns and serves it; rank zero tells the engines."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ctpo_megatron.base.addresses import own_address
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.memory import WeightMemory
from ctpo_megatron.engines.weights.offer import EngineFleet, Ranks, WeightSource
from ctpo_megatron.engines.weights.tcp import SECRET_BYTES, Offer, Share, WeightServer


@dataclass(frozen=True)
class ServedWeights:
    """`EngineWeights` that all ranks serve, of which some may still be copied; each rank closes its own."""

    version: int
    shares: Sequence[Share]
    sums: dict[str, tuple[int, int]]
    secret: bytes = field(repr=False)
    bucket_bytes: int
    timeout_s: float

    @property
    def names(self) -> frozenset[str]:
        """See `EngineWeights`."""
        return frozenset(entry[0] for share in self.shares for entry in share.entries)

    @property
    def size(self) -> int:
        """See `EngineWeights`."""
        return sum(entry[4] for share in self.shares for entry in share.entries)

    @contextmanager
    def offered(self) -> Iterator[dict[str, Any]]:
        """See `EngineWeights`."""
        shares = [(share.host, share.port, share.entries) for share in self.shares]
        yield vars(Offer(shares, self.secret.hex(), self.version, self.bucket_bytes, self.timeout_s))

    def close(self) -> None:
        """Nothing that rank zero could do for the others."""


class TcpTransport:
    """For engines on any node. A copy of what a rank owns stays in its node's memory until the next version."""

    def __init__(
        self,
        ranks: Ranks,
        engines: EngineFleet | None,
        *,
        bucket_bytes: int,
        timeout_s: float,
        address: str | None = None,
    ) -> None:
        """engines: None on ranks other than zero. address: that of rank zero's node; others, or all where it is None,
        serve on the one toward an engine's node."""
        self._ranks, self._engines, self._address = ranks, engines, address
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._memory = WeightMemory()
        self._server: WeightServer | None = None

    def init(self) -> None:
        """Agree on a secret, and begin to serve; waits until the engines are up."""
        self._secret = self._ranks.on_rank_zero(lambda: secrets.token_bytes(SECRET_BYTES))
        facts = self._ranks.on_rank_zero(lambda: self._rank_zero.engine_facts())
        host = own_address(self._address, facts.address)
        self._server = WeightServer(host, self._secret, self._timeout_s)

    def send(self, source: WeightSource, version: int) -> None:
        """See `WeightTransport`."""
        if self._server is None:
            raise RuntimeError("init comes before send")
        self._ranks.on_rank_zero(lambda: self._rank_zero.finish_update())  # whose copies are gone afterwards
        # Until they are up: a replaced engine is given the former version first.
        facts = self._ranks.on_rank_zero(lambda: self._rank_zero.engine_facts())
        began = time.monotonic()
        self._memory.plan(source.own_weight_shapes(), version)
        self._server.serve(self._memory)
        shares = self._ranks.gather(Share(*self._server.address, self._memory.entries))
        served = ServedWeights(
            version, [share for share in shares if share.entries], {}, self._secret, self._bucket_bytes, self._timeout_s
        )
        self._ranks.on_rank_zero(lambda: self._rank_zero.begin_update(served, began))
        checksums = Checksums(version, facts.dtype)
        self._memory.fill(source.own_weights(), checksums)
        for sums in self._ranks.gather(checksums.sums):
            served.sums.update(sums)

    def close(self) -> None:
        """See `WeightTransport`."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._memory.close()

    @property
    def _rank_zero(self) -> EngineFleet:
        assert self._engines is not None  # asked for in actions of rank zero only
        return self._engines
