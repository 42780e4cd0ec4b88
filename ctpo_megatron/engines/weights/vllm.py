"""Transports by vLLM's own trainer-side engines: an NCCL broadcast from rank zero, or CUDA IPC on shared GPUs.

vLLM sends and receives; ours are the source of the tensors, the checksums, the deadline, and what follows a failure.
Nobody has run this on a GPU: its tests run vLLM's classes with a communicator that records.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightSource as VllmSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from ctpo_megatron.base.addresses import own_address
from ctpo_megatron.engines.weights.checksums import Checksums, Sums
from ctpo_megatron.engines.weights.offer import EngineFacts, Ranks, WeightSource

log = logging.getLogger(__name__)

_ATTEMPTS = 2


class EngineClient(Protocol):
    """The engines of all fleets as vLLM's `VLLMWeightSyncClient`, on rank zero; its methods do not raise.

    An engine that fails or is late is left out of what follows, and is one of those that `settle` replaces. Otherwise
    rank zero would leave a collective in which the other ranks wait for it.
    """

    @property
    def workers(self) -> int:
        """Of all engines."""

    @property
    def members(self) -> tuple[object, ...]:
        """Changes when an engine is replaced."""

    def engine_facts(self) -> EngineFacts:
        """What a transport has to know of the engines; waits until they are up."""

    def begin(self, version: int, sums: Callable[[], Sums], failed: Callable[[], None]) -> None:
        """An update begins, and its deadline. sums: asked for at its end. failed: called when an engine fails."""

    def settle(self, began: float, size: int) -> bool:
        """Whether all engines took the weights; otherwise those that did not are replaced, and wait for theirs.

        Raises WeightSyncError when an engine keeps something else than was sent.
        """


class TrainerWeights(VllmSource):
    """The policy as vLLM's trainer side reads it; sums the tensors up on rank zero as they pass."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._declared = [ParamMeta(name, dtype, shape) for name, shape, dtype in source.weight_shapes()]
        self._running: Iterator[tuple[str, torch.Tensor]] | None = None
        self.checksums: Checksums | None = None

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
    """Rank zero broadcasts to all engines (`nccl`), or every rank shows its GPU's engines its memory (`ipc`)."""

    def __init__(
        self,
        ranks: Ranks,
        rank: int,
        engines: EngineClient | None,
        kind: str,
        *,
        bucket_bytes: int,
        timeout_s: float,
        address: str | None = None,
    ) -> None:
        """kind: `nccl` or `ipc`. engines: None on ranks other than zero. address: of rank zero; None: detected."""
        self._ranks, self._rank, self._engines, self._kind, self._address = ranks, rank, engines, kind, address
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._trainer: TrainerWeightTransferEngine[Any] | None = None
        self._weights: TrainerWeights | None = None
        self._members: tuple[object, ...] = ()

    def init(self) -> None:
        """Wait until the engines are up; they are met in the first update, and again after one was replaced."""
        self._facts = self._ranks.on_rank_zero(lambda: self._rank_zero.engine_facts())

    def send(self, source: WeightSource, version: int) -> None:
        """See `WeightTransport`. Raises TimeoutError when engines failed that were replaced for this update, too."""
        for _ in range(_ATTEMPTS):
            began = time.monotonic()
            weights = self._meet(source)
            self._ranks.on_rank_zero(partial(self._begin, weights, version))
            self._transfer(weights, version)
            if self._ranks.on_rank_zero(partial(self._settle, began, weights.size)):
                return
            self.close()
        raise TimeoutError(f"weights {version} reached not all engines in {_ATTEMPTS} attempts; their logs say why")

    def _settle(self, began: float, size: int) -> bool:
        return self._rank_zero.settle(began, size)

    def close(self) -> None:
        """Leave the engines; they are met again in the next update."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.shutdown()

    def _meet(self, source: WeightSource) -> TrainerWeights:
        """Open a group with the engines as they are now, unless it is open."""
        if self._ranks.on_rank_zero(lambda: self._rank_zero.members != self._members):
            self.close()
        if self._weights is None:
            self._weights = TrainerWeights(source)
        if self._trainer is None:
            info = self._ranks.on_rank_zero(self._open)
            if self._trainer is None:
                info.rank = self._rank
                nobody: Any = None  # vLLM's other ranks never call the engines
                self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=nobody, source=self._weights)
        return self._weights

    def _open(self) -> TrainerInitInfo:
        """Rank zero's side, whose failure all ranks shall hear of."""
        info, client = self._init_info(), self._rank_zero
        opened: Any = WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._weights)
        self._trainer, self._members = opened, client.members
        return info

    def _init_info(self) -> TrainerInitInfo:
        assert self._weights is not None
        size = max(self._bucket_bytes, self._weights.largest)  # with less, vLLM refuses it (IPC) or warns of it
        if self._kind == "ipc":
            return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=0)
        host = own_address(self._address, self._facts.address)
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        return NCCLTrainerInitInfo(
            master_address=host,
            master_port=port,
            world_size=1 + self._rank_zero.workers,
            packed=True,
            packed_buffer_size_bytes=size,
            rank=0,
        )

    def _begin(self, weights: TrainerWeights, version: int) -> None:
        assert self._trainer is not None
        checksums = weights.checksums = Checksums(version, self._facts.dtype)
        self._rank_zero.begin(version, lambda: checksums.sums, self._abort)

    def _transfer(self, weights: TrainerWeights, version: int) -> None:
        """One round of vLLM's trainer side. NCCL would wait for a dead engine for ever: it is aborted instead."""
        trainer = self._trainer
        assert trainer is not None
        if self._engines is None:
            trainer.send_weights()
            return
        abort = threading.Timer(self._timeout_s, self._abort)
        abort.start()
        try:
            trainer.send_weights()
        except RuntimeError as error:  # of NCCL, when it was aborted; `settle` knows which engines failed
            log.warning("weights %d: the transfer was broken off: %s", version, error)
            weights.drain()
        finally:
            abort.cancel()

    def _abort(self) -> None:
        """End what waits in NCCL, and make the rest of the transfer do nothing; from any thread."""
        group = getattr(self._trainer, "model_update_group", None)
        if group is not None:
            group.destroy()

    @property
    def _rank_zero(self) -> EngineClient:
        assert self._engines is not None  # asked for in actions of rank zero only
        return self._engines


def _bytes(meta: ParamMeta) -> int:
    return int(meta.dtype.itemsize * torch.Size(meta.shape).numel())
