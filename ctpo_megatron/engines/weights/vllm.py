"""Transports by vLLM's own trainer-side engines: an NCCL broadcast from rank zero, or CUDA IPC on shared GPUs.

vLLM sends and receives; ours are the source of the tensors, the checksums, the deadline, and what follows a failure.
This was never run on a GPU: its tests run vLLM's classes with a communicator that records.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightSource as VllmSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from ctpo_megatron.base.addresses import own_address
from ctpo_megatron.engines.weights.checksums import Checksums, Sums
from ctpo_megatron.engines.weights.client import WeightClient
from ctpo_megatron.engines.weights.offer import EngineFacts, Ranks, TransportSettings, WeightSource

if TYPE_CHECKING:
    from ctpo_megatron.engines.updates import PendingUpdate

_ABORT_POLL_S = 0.25
"""How often a transfer by NCCL checks whether an engine has failed."""

log = logging.getLogger(__name__)

_LARGER_THAN_BUCKET = r"Tensor '.*' has size \d+ bytes, which exceeds buffer_size_bytes"
"""vLLM's warning of a tensor that it sends in a bucket of its size."""


class TrainerWeights(VllmSource):
    """The policy as vLLM's trainer side reads it; sums the tensors up on rank zero as they pass."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._declared = [ParamMeta(name, dtype, shape) for name, shape, dtype in source.weight_shapes()]
        self._running: Iterator[tuple[str, torch.Tensor]] | None = None
        self.checksums: Checksums | None = None

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(meta.name for meta in self._declared)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(map(_bytes, self._declared))

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(map(_bytes, self._declared))

    def metadata(self) -> list[ParamMeta]:
        """Of the whole model, in the order of iteration."""
        return self._declared

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._source.weights()
        self._running = tensors if self.checksums is None else self.checksums.watch(tensors)
        return self._running

    def drain(self) -> None:
        """Go to the end of what was begun, or once through all: other ranks wait in the same collectives."""
        deque(self._running or iter(self), maxlen=0)
        self._running = None


class VllmTransport:
    """Rank zero broadcasts to all engines (`nccl`), or every rank shows its GPU's engines its memory (`ipc`).

    The group with the engines is opened in the first update, and again after an engine was replaced.
    """

    def __init__(self, ranks: Ranks, facts: EngineFacts, settings: TransportSettings) -> None:
        self.ranks, self.facts, self._settings = ranks, facts, settings
        self.client = WeightClient(facts.workers, settings.timeout_s)
        self._trainer: TrainerWeightTransferEngine[Any] | None = None
        self._weights: TrainerWeights | None = None
        self._members: tuple[object, ...] = ()
        self._broken = False

    def offer(self, source: WeightSource, version: int) -> VllmOffer:
        """See `WeightTransport`."""
        if self._weights is None:
            self._weights = TrainerWeights(source)
        return VllmOffer(version, self, self._weights)

    def close(self) -> None:
        """Leave the group; it is opened again in the next update."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.shutdown()

    def group(self, offer: VllmOffer) -> TrainerWeightTransferEngine[Any]:
        """The group with the engines as they are now; collective. Raises EngineError when an engine does not join."""
        if self.ranks.on_rank_zero(lambda: self._broken or self.client.members != self._members):
            self.close()
        if self._trainer is None:
            info = self.ranks.on_rank_zero(lambda: self._open(offer))
            if self._trainer is None:
                self._trainer = self._join(offer, info)
        return self._trainer

    def _open(self, offer: VllmOffer) -> TrainerInitInfo:
        """Rank zero's side, whose failure all ranks raise."""
        info = self._init_info(offer)
        opened: Any = WeightTransferTrainerFactory.trainer_init(info, client=self.client, source=offer.weights)
        self._trainer, self._members, self._broken = opened, self.client.members, False
        return info

    def _join(self, offer: VllmOffer, info: TrainerInitInfo) -> TrainerWeightTransferEngine[Any]:
        info.rank = self.ranks.rank
        no_client: Any = None  # vLLM's other ranks never call the engines
        return WeightTransferTrainerFactory.trainer_init(info, client=no_client, source=offer.weights)

    def _init_info(self, offer: VllmOffer) -> TrainerInitInfo:
        size = self._settings.bucket_bytes
        if self.facts.transport == "ipc":
            # Of one buffer, which has to hold any tensor.
            size = max(size, offer.weights.largest)
            return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=0)
        warnings.filterwarnings("ignore", _LARGER_THAN_BUCKET, UserWarning)
        host = own_address(self._settings.address, self.facts.address)
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        return NCCLTrainerInitInfo(
            master_address=host,
            master_port=port,
            world_size=1 + self.client.workers,
            packed=True,
            packed_buffer_size_bytes=size,
            rank=0,
        )

    def abort(self) -> None:
        """End what waits in NCCL, and make the rest of the transfer do nothing; from any thread."""
        self._broken = True
        group = getattr(self._trainer, "model_update_group", None)
        if group is not None:
            group.destroy()


class VllmOffer:
    """A `WeightOffer` that vLLM's trainer side sends; no copy of it is kept."""

    kept = False

    def __init__(self, version: int, transport: VllmTransport, weights: TrainerWeights) -> None:
        self.version, self.names, self.size = version, weights.names, weights.size
        self.weights, self.began = weights, time.monotonic()
        self._transport = transport
        self._checksums = Checksums(version, transport.facts.dtype)

    @property
    def sums(self) -> Sums:
        """See `WeightOffer`."""
        return self._checksums.sums

    def begin(self, update: PendingUpdate) -> None:
        """See `WeightOffer`; the engines are met in `transfer`."""
        self._transport.client.begin(update)

    def transfer(self) -> None:
        """One round of vLLM's trainer side; the update hears what became of each engine."""
        with _current_stream():
            group = self._transport.group(self)
            if self._transport.ranks.is_rank_zero:
                self.weights.checksums = self._checksums = Checksums(self.version, self._transport.facts.dtype)
                self._lead(group)
            else:
                group.send_weights()

    def _lead(self, group: TrainerWeightTransferEngine[Any]) -> None:
        with self._aborted_on_failure():
            try:
                group.send_weights()
            except RuntimeError as error:  # of NCCL, when it was aborted; the update knows which engines failed
                log.warning("weights %d: the transfer was aborted: %s", self.version, error)
                self.weights.drain()

    @contextmanager
    def _aborted_on_failure(self) -> Iterator[None]:
        """NCCL would wait for a dead engine for ever: within, the transfer is aborted once an engine has failed."""
        over, client = threading.Event(), self._transport.client

        def watch() -> None:
            while not over.wait(_ABORT_POLL_S):
                if client.failed or client.is_late:
                    return self._transport.abort()

        watcher = threading.Thread(target=watch, name="weight transfer", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def end(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


def _current_stream() -> AbstractContextManager[Any]:
    """This thread's CUDA stream, set for vLLM, too, and restored at the end.

    Where none was set, vLLM's `current_stream` sets a new one permanently. Gradient hooks belong to the former stream,
    so that torch would synchronize the two in every backward pass.
    """
    return torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_available() else nullcontext()


def _bytes(meta: ParamMeta) -> int:
    return int(meta.dtype.itemsize * torch.Size(meta.shape).numel())
