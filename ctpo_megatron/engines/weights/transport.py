"""How weights reach the engines: what a transport does on the trainer's ranks, and which one carries them.

For each version all ranks `announce` it. Rank zero's engines begin an update by the message that this returns. All
ranks `send` the tensors, and rank zero compares what the engines say they received with what was sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from ctpo_megatron.config import Transport, WeightsConfig
from ctpo_megatron.engines.engine import EngineError

if TYPE_CHECKING:
    import torch

    from ctpo_megatron.engines.pool import EnginePool
    from ctpo_megatron.engines.weights.checksums import Sums
    from ctpo_megatron.policy import Layout


class WeightTransport(ABC):
    """Carries weights from the trainer to the engines: one object on every trainer rank, with collective methods."""

    by_stage: ClassVar[bool] = False
    """Whether `send` takes only the tensors of this rank's pipeline stage."""

    @abstractmethod
    def announce(self, version: int) -> dict[str, Any] | None:
        """Begin a version, which is above 0; the former one can no longer be received.

        Returns what engines need in order to receive it; None when the transport leads them during `send`.
        """

    @abstractmethod
    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Sums:
        """Send the announced version: Hugging Face names and whole tensors, which are iterated to the end.

        Returns once the trainer may change its weights, while engines may still fetch a copy. Rank zero gets the sums
        of all tensors. Raises ValueError for a tensor that is not as in the manifest, EngineError when the engines do
        not join.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what lasts longer than an update; not collective."""


class SendsWeights(Protocol):
    """The trainer as the engine pool sees it: `TrainerGroup`, on rank zero. Both methods are collective."""

    def announce(self, version: int) -> dict[str, Any] | None:
        """Announce the current weights as `version` by the transport of these engines."""

    def send(self, version: int) -> Sums:
        """Send them; raises as `WeightTransport.send`."""


class Manifest:
    """Names, shapes and dtypes of all tensors of a model, in the order in which they are exported."""

    def __init__(self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        self.tensors = {name: (shape, dtype) for name, shape, dtype in tensors}

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [dtype.itemsize * prod(shape) for shape, dtype in self.tensors.values()]

    def checked(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors. Raises ValueError naming one that has another shape or dtype, or is not listed."""
        for name, tensor in tensors:
            listed = self.tensors.get(name)
            if listed != (tuple(tensor.shape), tensor.dtype):
                what = "which the model does not have" if listed is None else f"of which {listed} was announced"
                raise ValueError(f"weights: {name} {tensor.dtype}{list(tensor.shape)} came, {what}")
            yield name, tensor
            del tensor  # or it would stay while the next one is gathered

    def check_complete(self, names: Collection[str]) -> None:
        """Raises ValueError naming tensors that are missing among `names`."""
        if missing := [name for name in self.tensors if name not in names]:
            raise ValueError(f"weights: {len(missing)} tensors were announced, but did not come, e.g. {missing[0]}")

    def check_model(self, directory: Path) -> None:
        """Raises EngineError naming tensors that engines load from `directory` and that no update would change."""
        # A head that is the embedding has no tensor of its own, whatever the directory stores.
        if missing := sorted(_stored_names(directory) - self.tensors.keys() - {"lm_head.weight"}):
            raise EngineError(f"weights: {len(missing)} tensors of {directory} are not sent, e.g. {missing[:3]}")


def _stored_names(directory: Path) -> frozenset[str]:
    """Returns the tensor names of a safetensors checkpoint; none when it has another format."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), "pt") as handle:
            names.update(handle.keys())
    return frozenset(names)


@dataclass(frozen=True)
class EngineFacts:
    """What a transport has to know of the engines.

    dtype: of their parameters. address: of an engine's node. transport: what carries weights to them. workers: GPUs of
    one engine. log: where that engine writes on its node.
    """

    dtype: torch.dtype
    address: str
    transport: Transport
    workers: int = 1
    log: str = ""


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


def open_transport(
    ranks: Layout, facts: EngineFacts, settings: TransportSettings, manifest: Manifest, pool: EnginePool | None
) -> WeightTransport:
    """Open the transport that these engines take; collective. pool: has the engines; None on ranks other than zero."""
    if facts.transport == "tcp":
        from ctpo_megatron.engines.weights.tcp import TcpTransport

        return TcpTransport(ranks, facts, settings, manifest)
    from ctpo_megatron.engines.weights.vllm import VllmTransport

    return VllmTransport(ranks, facts, settings, manifest, pool)
