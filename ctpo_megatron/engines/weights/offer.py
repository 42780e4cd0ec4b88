"""How the trainer's weights reach the engines: a transport makes an offer, the engine pool has it taken.

On all ranks `trainer.offer(version)` makes the offer. On rank zero `pool.update(offer)` has the engines begin to take
it. On all ranks `trainer.transfer()` lets the tensors travel. On rank zero `pool.finish_update()` compares the version
and checksums of every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from ctpo_megatron.config import Transport, WeightsConfig

if TYPE_CHECKING:
    import torch

    from ctpo_megatron.base.tensor_rows import TensorRows
    from ctpo_megatron.engines.updates import PendingUpdate
    from ctpo_megatron.engines.weights.checksums import Sums

T = TypeVar("T")


class WeightSource(Protocol):
    """Has the weights: `Trainer`."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor), one at a time, on every rank; collective, iterated to the end."""

    def own_weights(self) -> Iterator[tuple[TensorRows, torch.Tensor]]:
        """The rows of `weights` that this rank is to send: each is of one rank. Collective, iterated to the end."""

    def own_weight_rows(self) -> list[TensorRows]:
        """What `own_weights` yields, in its order, without the numbers; not collective."""

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of all `weights`, in their order, on every rank. Collective; no weight is moved."""


class WeightOffer(Protocol):
    """One version of the weights on its way to the engines; one object on every rank.

    names: of all tensors. size: bytes that an engine takes. began: when the offer began to be made, monotonic seconds.
    kept: whether engines can be given it again until it is closed, such as one that is replaced; otherwise these wait
    for the next offer. sums: of the tensors in the engines' dtype; complete once `transfer` has returned.
    """

    version: int
    names: frozenset[str]
    size: int
    began: float
    kept: bool

    @property
    def sums(self) -> Sums:
        """By tensor name."""

    def begin(self, update: PendingUpdate) -> None:
        """Tell the engines of an update what to take, or remember them for `transfer`. Rank zero; called once for each
        update, also while earlier ones of the same offer have not ended."""

    def transfer(self) -> None:
        """Make the tensors available, or send them. Collective; afterwards the trainer may change its weights."""

    def end(self) -> None:
        """An update that `begin` began has ended. Rank zero."""

    def close(self) -> None:
        """Release what the offer holds; not collective."""


class OffersWeights(Protocol):
    """The trainer as the engine pool sees it: `TrainerGroup`, on rank zero. Both methods are collective."""

    def offer(self, version: int) -> WeightOffer:
        """Offer the current weights as `version`; see `WeightTransport.offer`."""

    def transfer(self) -> None:
        """See `WeightOffer.transfer`, of the latest offer."""


class WeightTransport(Protocol):
    """Carries weights from the trainer to the engines; one object on every trainer rank."""

    def offer(self, source: WeightSource, version: int) -> WeightOffer:
        """Offer the current weights as `version`. Collective. The engines must have taken the offer before it."""

    def close(self) -> None:
        """Release what lasts longer than an offer; not collective."""


class Ranks(Protocol):
    """The trainer's ranks, as a transport calls them: `Layout`."""

    @property
    def rank(self) -> int: ...

    @property
    def is_rank_zero(self) -> bool: ...

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """The result of `action`, which rank zero alone runs, on every rank."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in rank order."""


@dataclass(frozen=True)
class EngineFacts:
    """What a transport has to know of the engines.

    dtype: of their parameters. address: of an engine's node. transport: what carries weights to them. workers: GPUs of
    one engine.
    """

    dtype: torch.dtype
    address: str
    transport: Transport
    workers: int = 1


@dataclass(frozen=True)
class TransportSettings:
    """bucket_bytes: of tensors that travel together. timeout_s: `rollout.weights.timeout_s`. address: of rank zero's
    node; None: found from the address of an engine."""

    bucket_bytes: int
    timeout_s: float
    address: str | None = None

    @classmethod
    def of(cls, weights: WeightsConfig, address: str | None = None) -> Self:
        """As configured: `rollout.weights` and `cluster.node_address`."""
        return cls(weights.bucket_mib << 20, weights.timeout_s, address)


def open_transport(ranks: Ranks, facts: EngineFacts, settings: TransportSettings) -> WeightTransport:
    """The transport of these engines; collective."""
    if facts.transport == "file":
        from ctpo_megatron.engines.weights.file import FileTransport

        return FileTransport(ranks, facts)
    if facts.transport == "tcp":
        from ctpo_megatron.engines.weights.tcp_transport import TcpTransport

        return TcpTransport(ranks, facts, settings)
    from ctpo_megatron.engines.weights.vllm import VllmTransport

    return VllmTransport(ranks, facts, settings)


def init_request(info: dict[str, Any]) -> Any:
    """What `AsyncLLM.init_weight_transfer_engine` takes. info: of the trainer's side of such a transport."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info=info)


def update_request(offer: dict[str, Any]) -> Any:
    """What `AsyncLLM.update_weights` takes. offer: fields of the update info of the engine's backend."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info=offer)
