"""How the trainer's weights reach the engines: the protocols, and the way through one file of rank zero's node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from ctpo_megatron.engines.weights.checksums import Sums

T = TypeVar("T")
NamedTensors = Iterable[tuple[str, "torch.Tensor"]]


class WeightSource(Protocol):
    """Has the weights: `Trainer`."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor), one at a time, on every rank; collective, iterated to the end."""

    def own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of `weights` that this rank is to send: each is of one rank. Collective, iterated to the end."""

    def own_weight_shapes(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of what `own_weights` yields, in its order; not collective."""

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of all `weights`, in their order, on every rank. Collective; no weight is moved."""


class EngineWeights(Protocol):
    """One version of the weights, that engines can be given as often as it takes until it is closed."""

    @property
    def version(self) -> int: ...

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""

    @property
    def sums(self) -> Sums:
        """What the engines' own parameters have to sum up to; complete when the update is to be finished."""

    @property
    def size(self) -> int:
        """Bytes that an engine takes."""

    def offered(self) -> AbstractContextManager[dict[str, Any]]:
        """What an engine is told in order to take them; valid inside the block."""

    def close(self) -> None:
        """Release them."""


@dataclass(frozen=True)
class EngineFacts:
    """dtype: of the engines' parameters. address: of an engine's node."""

    dtype: torch.dtype
    address: str


class EngineFleet(Protocol):
    """Has the engines: `EnginePool`, on rank zero."""

    def engine_facts(self) -> EngineFacts:
        """What a transport has to know of the engines; waits until they are up."""

    def begin_update(self, weights: EngineWeights, began: float) -> None:
        """All engines begin to take these weights, which the fleet closes when it is given the next ones.

        began: when they began to be made, on the monotonic clock.
        """

    def finish_update(self) -> None:
        """Return when all engines have the weights of the last `begin_update`, and were checked."""


class WeightReceiver(Protocol):
    """Takes the weights: a rollout source."""

    def publish(self, named_tensors: NamedTensors, version: int) -> None:
        """Sample with these weights from now on; they are `version`, and not needed afterwards."""


class WeightTransport(Protocol):
    """Carries weights from the trainer to the engines; one object on every trainer rank."""

    def init(self) -> None:
        """Prepare what lasts for the run, once; collective."""

    def send(self, source: WeightSource, version: int) -> None:
        """Give every engine the weights; what is sampled afterwards is of them. Collective.

        Returns when the trainer can change them. Engines that take a copy of them may still be at it: each says then
        that they are `version`, and is checked (`EngineFleet.finish_update`). An engine that is late by
        `rollout.weights.timeout_s` or dies is replaced, and the new one is given them.
        """

    def close(self) -> None:
        """Release what `init` and `send` made; not collective."""


class Ranks(Protocol):
    """The trainer's ranks, as a transport calls them: `Layout`."""

    @property
    def is_rank_zero(self) -> bool: ...

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """The result of `action`, which rank zero alone runs, on every rank."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in rank order."""


class FileTransport:
    """Every tensor is gathered on all ranks, one at a time; rank zero hands it to the receiver of its process.

    For engines on rank zero's node: `EnginePool` writes the tensors to one file in shared memory.
    """

    def __init__(self, receiver: WeightReceiver | None) -> None:
        """receiver: None on ranks other than zero."""
        self._receiver = receiver

    def init(self) -> None:
        """Nothing lasts longer than an update."""

    def send(self, source: WeightSource, version: int) -> None:
        """See `WeightTransport`."""
        if self._receiver is not None:
            self._receiver.publish(source.weights(), version)
        else:
            deque(source.weights(), maxlen=0)  # a loop would keep each tensor while the next one is gathered

    def close(self) -> None:
        """Nothing to release; the fleet has the weights."""
