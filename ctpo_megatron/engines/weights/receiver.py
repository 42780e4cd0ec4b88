"""The engine's end of a weight update: vLLM weight-transfer backends for a safetensors file and for TCP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ctpo_megatron.engines.weights.engine_checksums import kept_parts
from ctpo_megatron.engines.weights.tcp import FetchMessage, fetched

FILE, TCP = "ctpo_file", "ctpo_tcp"
"""Names of the backends."""

UpdateInfo = TypeVar("UpdateInfo", bound=WeightTransferUpdateInfo)


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """path: safetensors file with Hugging Face names and shapes."""

    path: str


@dataclass
class TcpUpdateInfo(FetchMessage, WeightTransferUpdateInfo):
    """As vLLM wants it."""


class CheckpointEngine(WeightTransferEngine[NoInitInfo, UpdateInfo]):
    """Loads a whole checkpoint-format state dict that comes tensor by tensor."""

    init_info_cls = NoInitInfo

    @abstractmethod
    def tensors(self, update_info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor)"""

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Give every layer its loadable parameters back."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load every tensor; raises what `tensors` raises."""
        self.model.load_weights(self.tensors(update_info))

    def finish_weight_update(self) -> None:
        """Turn the loaded parameters into the layout the kernels want."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            from ctpo_megatron.engines.cpu.packed_weights import pack_again

            pack_again(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


class FileEngine(CheckpointEngine[FileUpdateInfo]):
    """From a file on the same node."""

    update_info_cls = FileUpdateInfo

    def tensors(self, update_info: FileUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the file; raises FileNotFoundError when it is not visible from here."""
        path = update_info.path
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"{path}: not visible to this engine: rollout.weights.transport: file is for one node"
            )
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


class TcpEngine(CheckpointEngine[TcpUpdateInfo]):
    """From the trainer's ranks."""

    update_info_cls = TcpUpdateInfo

    def tensors(self, update_info: TcpUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """As they arrive; raises ConnectionError naming the address of the rank that is late or gone."""
        return fetched(update_info)


class WorkerExtension:
    """Methods added to every vLLM worker (`worker_extension_cls`); importing this module registers the backends."""

    model_config: Any
    get_model: Callable[[], torch.nn.Module]  # vLLM's worker has it; without the wrapper of CUDA graphs

    def ctpo_checksums(self, version: int) -> list[tuple[str, str, bool, int]]:
        """Fields of each `Part` that this worker keeps."""
        return [astuple(part) for part in kept_parts(self.get_model(), version, self.model_config.dtype)]


for backend, engine in ((FILE, FileEngine), (TCP, TcpEngine)):
    WeightTransferEngineFactory.register_engine(backend, engine)
