"""The engine's end of a weight update: backends of vLLM that sum up what they are given to load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ctpo_megatron.engines.weights.checksums import Checksums, Sums
from ctpo_megatron.engines.weights.tcp import FetchMessage, fetched


def backend(transport: str) -> str:
    """Return the name under which vLLM knows the backend of a transport."""
    return f"ctpo_{transport}"


def init_request(info: dict[str, Any]) -> Any:
    """Make what `AsyncLLM.init_weight_transfer_engine` takes. info: of the trainer's side of vLLM's transports."""
    return WeightTransferInitRequest(init_info=info)


def update_request(message: dict[str, Any]) -> Any:
    """Make what `AsyncLLM.update_weights` takes. message: fields of the update info of the engine's backend."""
    return WeightTransferUpdateRequest(update_info=message)


class Summed:
    """A model whose tensors are summed as they are loaded."""

    def __init__(self, model: Any, received: Checksums) -> None:
        self._model, self._received = model, received

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """As the model does."""
        return self._model.load_weights(self._received.watch(weights))


class SumsReceived(WeightTransferEngine[Any, Any]):
    """Before one of the backends: sums up the tensors of each update."""

    model: Any  # what loads the weights
    received = Checksums()
    """Of the update that began last."""

    def start_weight_update(self) -> None:
        """As the backend does."""
        self.received = Checksums()
        super().start_weight_update()

    def receive_weights(self, update_info: Any) -> None:
        """As the backend does."""
        model = self.model
        self.model = Summed(model, self.received)
        try:
            super().receive_weights(update_info)
        finally:
            self.model = model


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class TcpUpdateInfo(FetchMessage, WeightTransferUpdateInfo):
    """As vLLM wants it."""


class FetchingEngine(WeightTransferEngine[NoInitInfo, TcpUpdateInfo]):
    """Fetches the whole model from the trainer's serving ranks."""

    init_info_cls = NoInitInfo
    update_info_cls = TcpUpdateInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Give every layer its loadable parameters back."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: TcpUpdateInfo) -> None:
        """Load every tensor as it arrives; raises what `fetched` raises."""
        model: Any = self.model
        model.load_weights(fetched(update_info))

    def finish_weight_update(self) -> None:
        """Turn the loaded parameters into the layout the kernels want."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            from ctpo_megatron.engines.cpu.gemm import pack_again

            pack_again(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


class TcpEngine(SumsReceived, FetchingEngine):
    """Over TCP, from the trainer's serving ranks."""


class NcclEngine(SumsReceived, NCCLWeightTransferEngine):
    """By vLLM's broadcast."""


class IpcEngine(SumsReceived, IPCWeightTransferEngine):
    """From the memory of the GPU that the engine shares with the trainer."""


BACKENDS = {"tcp": TcpEngine, "nccl": NcclEngine, "ipc": IpcEngine}
"""By transport."""


class WorkerExtension:
    """Methods added to every vLLM worker (`worker_extension_cls`); importing this module registers the backends."""

    weight_transfer_engine: SumsReceived  # vLLM's worker has it

    def ctpo_sums(self) -> Sums:
        """Return the sums of what this worker has received in the last update."""
        return self.weight_transfer_engine.received.sums()


for transport, engine in BACKENDS.items():
    WeightTransferEngineFactory.register_engine(backend(transport), engine)
