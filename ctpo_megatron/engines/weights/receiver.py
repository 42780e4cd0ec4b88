"""The engine's end of a weight update: vLLM weight-transfer backends for a safetensors file and for TCP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from ctpo_megatron.engines.weights.engine_checksums import kept_parts
from ctpo_megatron.engines.weights.tcp import Offer, Share, fetched

FILE, TCP = "ctpo_file", "ctpo_tcp"
"""Names of the backends."""

PendingUpdate = TypeVar("PendingUpdate", bound=WeightTransferUpdateInfo)


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """path: safetensors file with Hugging Face names and shapes."""

    path: str


@dataclass
class TcpUpdateInfo(Offer, WeightTransferUpdateInfo):
    """As vLLM wants it."""


class CheckpointEngine(WeightTransferEngine[NoInitInfo, PendingUpdate]):
    """Loads a whole checkpoint-format state dict that comes tensor by tensor."""

    init_info_cls = NoInitInfo

    @abstractmethod
    def tensors(self, update_info: PendingUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor)"""

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Give every layer its loadable parameters back."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PendingUpdate) -> None:
        """Load every tensor; raises what `tensors` raises."""
        self.model.load_weights(self.tensors(update_info))

    def finish_weight_update(self) -> None:
        """Turn the loaded parameters into the layout the kernels want."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # A head tied to the embedding receives no weights of its own, so vLLM 0.32 does not process it again, and
            # on CPU it would continue with the packed copy of the previous weights.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
            # Experts are packed for CPU kernels when they are first loaded, and by vLLM 0.32 not again: its kernels
            # would read the new weights as if they were packed.
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and current_platform.is_cpu():
                kernel.fused_experts.process_weights_after_loading(module)

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
        shares = [Share(*share) for share in update_info.shares]
        secret, timeout_s = bytes.fromhex(update_info.secret), update_info.timeout_s
        return fetched(shares, secret, update_info.version, update_info.bucket_bytes, timeout_s)


class WorkerExtension:
    """Methods added to every vLLM worker (`worker_extension_cls`); importing this module registers the backends."""

    model_config: Any
    get_model: Callable[[], torch.nn.Module]  # vLLM's worker has it; without the wrapper of CUDA graphs

    def ctpo_checksums(self, version: int) -> list[tuple[str, str, bool, int]]:
        """Fields of each `Part` that this worker keeps."""
        return [astuple(part) for part in kept_parts(self.get_model(), version, self.model_config.dtype)]


for backend, engine in ((FILE, FileEngine), (TCP, TcpEngine)):
    if backend not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend, engine)
