"""The engine's end of a weight update: a vLLM weight-transfer backend that reads one safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

BACKEND = "ctpo_file"
_SAMPLES = 64


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: weights file not visible to this engine (it must share a node with rank 0)")
    with safe_open(path, "pt") as file:
        yield file


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """path: safetensors file with Hugging Face names and shapes."""

    path: str


class FileWeightEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads a whole checkpoint-format state dict from a file on the same node."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Give every layer its loadable parameters back."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load every tensor of the file; raises FileNotFoundError when it is not visible from here."""
        with _opened(update_info.path) as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        """Turn the loaded parameters into the layout the kernels want."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # A head tied to the embedding receives no weights of its own, so vLLM 0.32 does not process it again,
            # and on CPU it would go on with the packed copy of the previous weights.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
            # Experts are packed for CPU kernels when they are first loaded, and by vLLM 0.32 not again: its kernels
            # would read the new weights as if they were packed.
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and current_platform.is_cpu():
                kernel.fused_experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to release."""


class WorkerExtension:
    """Methods added to every vLLM worker (`worker_extension_cls`); importing this module registers the backend."""

    get_model: Callable[[], torch.nn.Module]  # vLLM's worker has it; without the wrapper of CUDA graphs

    def ctpo_compare_weights(self, path: str) -> tuple[int, list[str]]:
        """(tensors compared, names that differ) between the file and the live parameters.

        Only parameters that the engine keeps under the checkpoint's name and shape can be compared (embeddings, norms;
        fused and repacked ones cannot), a few evenly spaced elements of each, in the engine's own precision.
        """
        live = dict(self.get_model().named_parameters())
        compared, wrong = 0, []
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                parameter = live.get(name)
                if parameter is None or list(parameter.shape) != file.get_slice(name).get_shape():
                    continue
                want = file.get_tensor(name).flatten()
                index = torch.linspace(0, want.numel() - 1, min(_SAMPLES, want.numel()), dtype=torch.float64).long()
                have = parameter.detach().flatten()[index.to(parameter.device)].cpu()
                compared += 1
                if not torch.equal(want[index].to(have.dtype), have):
                    wrong.append(name)
        return compared, wrong


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeightEngine)
