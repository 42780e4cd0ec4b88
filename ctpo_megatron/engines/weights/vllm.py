"""Weights by vLLM's own trainer-side engines: an NCCL broadcast from rank zero, or CUDA IPC on shared GPUs.

vLLM sends and receives; ours are the source of the tensors, their sums, the deadline, and what follows a failure.
This was never run on a GPU: its tests run vLLM's classes with stand-ins for NCCL and for CUDA's handles of memory.
"""

from __future__ import annotations

import base64
import logging
import pickle
import socket
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from ctpo_megatron.base.addresses import own_address
from ctpo_megatron.engines.engine import EngineError
from ctpo_megatron.engines.weights.checksums import Checksums, Sums
from ctpo_megatron.engines.weights.transport import EngineFacts, Manifest, TransportSettings, WeightTransport

if TYPE_CHECKING:
    from ctpo_megatron.engines.pool import EnginePool
    from ctpo_megatron.policy import Layout

log = logging.getLogger(__name__)

_LARGER_THAN_BUCKET = r"Tensor '.*' has size \d+ bytes, which exceeds buffer_size_bytes"
"""vLLM's warning of a tensor that it sends in a bucket of its size."""


class VllmTransport(WeightTransport):
    """Rank zero broadcasts to all engines (`nccl`), or every rank shows its GPU's engines its memory (`ipc`).

    Both lead the engines, call by call: on rank zero this is also the `VLLMWeightSyncClient` that vLLM's trainer side
    calls. Their group is opened in the first update, and again after an engine was replaced.
    """

    def __init__(
        self,
        ranks: Layout,
        facts: EngineFacts,
        settings: TransportSettings,
        manifest: Manifest,
        pool: EnginePool | None,
    ) -> None:
        self._ranks, self._facts, self._settings, self._manifest = ranks, facts, settings, manifest
        self._source, self._engines = TensorSource(manifest), pool
        # An engine that fails leaves the others waiting in NCCL, and not where each reads the memory of its own GPU.
        self._abort = self.abort if facts.transport == "nccl" else None
        self._group: TrainerWeightTransferEngine[Any] | None = None
        self._members: Sequence[object] = ()
        self._version, self._aborted = 0, False

    def announce(self, version: int) -> None:
        """See `WeightTransport`: `send` calls the engines."""

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Sums:
        """See `WeightTransport`: one round of vLLM's trainer side. The pool hears what becomes of each engine."""
        checksums = Checksums()
        checked = self._manifest.checked(tensors)
        self._source.tensors = checksums.watch(checked) if self._ranks.is_rank_zero else checked
        with _current_stream():
            group, self._version = self._opened(), version
            try:
                group.send_weights()
            except RuntimeError as error:  # of NCCL, when it was aborted; the pool knows which engine has failed
                if not self._aborted:
                    raise
                log.warning("weights %d: the transfer was aborted: %s", version, error)
            deque(self._source, maxlen=0)  # the rest of what was aborted: other ranks wait in the same collectives
        if self._ranks.is_rank_zero:
            self._manifest.check_complete(checksums.sums())
        return checksums.sums()

    def close(self) -> None:
        """Leave the group; it is opened again in the next update."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def abort(self) -> None:
        """End what waits in NCCL, and make the rest of the transfer do nothing; from any thread."""
        self._aborted = True
        communicator = getattr(self._group, "model_update_group", None)
        if communicator is not None:
            communicator.destroy()

    def _opened(self) -> TrainerWeightTransferEngine[Any]:
        """The group with the engines as they are now; collective. Raises EngineError when an engine does not join."""
        if self._ranks.on_rank_zero(self._has_changed):
            self.close()
        if self._group is None:
            info = self._ranks.on_rank_zero(self._open)
            if self._group is None:
                info.rank = self._ranks.rank
                no_client: Any = None  # vLLM's other ranks never call the engines
                self._group = WeightTransferTrainerFactory.trainer_init(info, client=no_client, source=self._source)
        return self._group

    def _has_changed(self) -> bool:
        return self._aborted or self._pool.members != self._members

    def _open(self) -> TrainerInitInfo:
        """Rank zero's side, whose failure all ranks raise."""
        info, self._aborted = self._init_info(len(self._pool.members)), False
        opened: Any = WeightTransferTrainerFactory.trainer_init(info, client=self, source=self._source)
        self._group, self._members = opened, self._pool.members
        return info

    def _init_info(self, engines: int) -> TrainerInitInfo:
        size = self._settings.bucket_bytes
        if self._facts.transport == "ipc":
            # Of one buffer, which has to hold any tensor.
            size = max(size, *self._manifest.sizes)
            return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=0)
        warnings.filterwarnings("ignore", _LARGER_THAN_BUCKET, UserWarning)
        host = own_address(self._settings.address, self._facts.address)
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        return NCCLTrainerInitInfo(
            master_address=host,
            master_port=port,
            world_size=1 + engines * self._facts.workers,
            packed=True,
            packed_buffer_size_bytes=size,
            rank=0,
        )

    # vLLM's client, on rank zero. Methods but the first do not raise: rank zero would leave a collective in which the
    # other ranks wait for it. The pool leaves an engine that fails or is late out of the rest of the update.

    @property
    def _pool(self) -> EnginePool:
        assert self._engines is not None  # rank zero has them
        return self._engines

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tell every engine the first rank of its workers in the group, where there is one. Raises EngineError."""
        first, each = init_info.get("rank_offset"), self._facts.workers

        def own(number: int) -> list[dict[str, Any]]:
            return [init_info if first is None else init_info | {"rank_offset": first + number * each}]

        if failed := self._pool.lead("init_weight_transfer", own):
            raise EngineError(f"did not join the weight transport: {', '.join(failed)}")

    def start_weight_update(self) -> None:
        """Freeze the requests of all engines."""
        self._pool.lead("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let all engines receive what is announced; returns when they have it."""
        if (handles := update_info.get("ipc_handles")) is not None:
            # Tuples with classes in them, which the engines' own serialization refuses.
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            update_info = {**update_info, "ipc_handles": None, "ipc_handles_pickled": pickled}
        self._pool.lead("receive_weights", lambda _: [update_info], self._abort)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let all engines compute with the new weights and report them."""
        self._pool.lead("finish_weight_update", lambda _: [self._version])


class TensorSource(WeightSource):
    """The policy as vLLM's trainer side reads it: once for each update, from what `tensors` has been set to."""

    tensors: Iterator[tuple[str, torch.Tensor]]

    def __init__(self, manifest: Manifest) -> None:
        self._listed = [ParamMeta(name, dtype, shape) for name, (shape, dtype) in manifest.tensors.items()]

    def metadata(self) -> list[ParamMeta]:
        """Of the whole model, in the order of iteration."""
        return self._listed

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors


def _current_stream() -> AbstractContextManager[Any]:
    """This thread's CUDA stream, set for vLLM, too, and restored at the end.

    Where none was set, vLLM's `current_stream` sets a new one permanently. Gradient hooks belong to the former stream,
    so that torch would synchronize the two in every backward pass.
    """
    return torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_available() else nullcontext()
