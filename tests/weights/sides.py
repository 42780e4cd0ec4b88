"""Both sides of a transfer: the trainer of one rank as the pool calls it, and what a worker does with what arrives."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from ctpo_megatron.engines.weights import EngineFacts, Manifest, TransportSettings, open_transport
from ctpo_megatron.engines.weights.checksums import Checksums, Sums
from ctpo_megatron.engines.weights.tcp import FetchMessage, fetched

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]


class OneRank:
    """A job of one rank, as a transport sees its `Layout`, without megatron."""

    rank, pp_rank, is_rank_zero = 0, 0, True

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        return action()

    def gather(self, value: T) -> list[T]:
        return [value]


ONE_RANK: Any = OneRank()


def manifest_of(tensors: Tensors) -> Manifest:
    return Manifest((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())


class Sender:
    """Sends `tensors`, or what `sends` makes of them."""

    def __init__(self, tensors: Tensors, facts: EngineFacts, settings: TransportSettings, pool: Any) -> None:
        self.tensors = tensors
        self.sends: Callable[[Tensors], Any] = dict.items
        self._transport = open_transport(ONE_RANK, facts, settings, manifest_of(tensors), pool)

    def announce(self, version: int) -> dict[str, Any] | None:
        return self._transport.announce(version)

    def send(self, version: int) -> Sums:
        return self._transport.send(self.sends(self.tensors), version)

    def close(self) -> None:
        self._transport.close()


class Fetching:
    """The worker's side of `tcp`, without vLLM."""

    def __init__(self, model: Any) -> None:
        self.model, self.received = model, Checksums()

    def fetch(self, message: dict[str, Any], met: Callable[[], None]) -> None:
        for number, (name, tensor) in enumerate(self.received.watch(fetched(FetchMessage(**message)))):
            if number == 1:
                met()
            self.model.load_weights([(name, tensor)])


def worker(transport: str, model: Any) -> Any:
    """What loads weights into a model: our backend of vLLM, whose model has no layers to reload."""
    if transport == "tcp":
        return Fetching(model)
    from ctpo_megatron.engines.weights.receiver import BACKENDS

    made: Any = BACKENDS[transport]
    return made(None, SimpleNamespace(parallel_config=None, model_config=None), torch.device("cpu", 0), model)


def begin(of: Any) -> None:
    """As `start_weight_update`."""
    of.model.tensors.clear()
    of.received = Checksums()


def report(of: Any, changed: str = "") -> list[Sums]:
    """The sums of what has arrived, with another one for the tensor that has changed."""
    sums = of.received.sums()
    if changed:
        sums[changed] = (sums[changed][0], sums[changed][1] + 1)
    return [sums]
