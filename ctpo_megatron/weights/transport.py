"""How the trainer's weights reach the engines: the protocol, and the way through one file of rank zero's node."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]


class WeightSource(Protocol):
    """Has the weights: `Policy`."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor), one at a time, on every rank; collective, iterated to the end."""


class WeightReceiver(Protocol):
    """Takes the weights: a rollout source."""

    def publish(self, named_tensors: NamedTensors, version: int) -> None:
        """Sample with these weights from now on; they are `version`."""


class WeightTransport(Protocol):
    """Carries weights from the trainer to the engines; one object on every trainer rank."""

    def send(self, source: WeightSource, version: int) -> None:
        """Return when every engine has the weights and has said that they are `version`. Collective."""


class RankZeroTransport:
    """Every tensor is gathered on all ranks, one at a time; rank zero hands it to the receiver of its process.

    For engines on rank zero's node: `RolloutFleet` writes the tensors to one file in shared memory.
    """

    def __init__(self, receiver: WeightReceiver | None) -> None:
        """receiver: None on ranks other than zero."""
        self._receiver = receiver

    def send(self, source: WeightSource, version: int) -> None:
        """See `WeightTransport`."""
        if self._receiver is not None:
            self._receiver.publish(source.weights(), version)
        else:
            deque(source.weights(), maxlen=0)  # a loop would keep each tensor while the next one is gathered
