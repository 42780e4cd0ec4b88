"""vLLM's side of a weight transfer on a pretended GPU: its model, its worker's engine, its reload; no scheduler."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.model_executor.layers.quantization.online.fp8
import vllm.model_executor.layers.quantization.online.moe_base  # noqa: F401  (imported by a reload, too; see _be_cuda)
from vllm.config import WeightTransferConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer import nccl_engine
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum
from vllm.utils.torch_utils import current_stream, set_default_torch_dtype

from ctpo_megatron.engines.weights.checksums import Sums
from ctpo_megatron.engines.weights.receiver import BACKENDS
from tests.rehearsal.claims import launch, unchecked
from tests.rehearsal.pretend import pretending
from tests.rehearsal.streams import Event, Process, running
from tests.support.deadlines import scaled

_ALONE = SimpleNamespace(world_size=1, rank_in_group=0, rank=0, is_first_rank=True, is_last_rank=True)
WAIT_S = 60.0


class Communicator:
    """Stands for `PyNcclCommunicator`: takes vLLM's stream as that does, and orders what it is asked for, as NCCL does
    on all streams of one communicator."""

    pipe: queue.Queue[torch.Tensor] = queue.Queue()
    """From the trainer to its engine, which are threads of one process."""

    def __init__(self, rank: int) -> None:
        self._rank, self._last = rank, Event()
        stream = current_stream()
        launch("all_reduce", writes=[torch.zeros(1, device="cuda")])
        stream.synchronize()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        stream = stream or current_stream()
        stream.wait_event(self._last)
        with torch.cuda.stream(stream):
            if self._rank == src:
                launch("broadcast", reads=[tensor])
            else:
                launch("broadcast", writes=[tensor])
        self._last = stream.record_event()
        with unchecked():
            if self._rank == src:
                self.pipe.put(tensor.clone())
            else:
                tensor.copy_(self.pipe.get(timeout=scaled(WAIT_S)))

    def destroy(self) -> None:
        """There is nothing to end."""


class Engine:
    """One engine of one GPU: an engine handle and what it calls. weights: bytes of its model."""

    name, log_path, ready_ref, launches = "engine", Path("engine.log"), 1, 1

    def __init__(self, model: Path, transport: str, process: Process) -> None:
        self.process = process
        with running(process), torch.device("cuda", process.index):
            arguments = EngineArgs(
                model=str(model), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=128
            )
            self._config = arguments.create_engine_config()
            with set_default_torch_dtype(torch.bfloat16):
                self._model = initialize_model(self._config)
            _be_cuda()
            here = torch.device("cuda", process.index)
            with set_current_vllm_config(self._config):
                process_weights_after_loading(self._model, self._config.model_config, here)
            transfer: Any = BACKENDS[transport]
            self._worker = transfer(WeightTransferConfig(backend=transport), self._config, here, self._model)
        self.weights = sum(parameter.nbytes for parameter in self._model.parameters())

    def call(self, method: str, *arguments: Any) -> Any:
        """What an actor does; returns when it is done."""
        with pretending(), running(self.process), set_current_vllm_config(self._config):
            return getattr(self, f"_{method}")(*arguments)

    def _init_weight_transfer(self, info: dict[str, Any]) -> None:
        self._worker.init_transfer_engine(self._worker.parse_init_info(info))

    def _start_weight_update(self) -> None:
        self._worker.start_weight_update()

    def _receive_weights(self, info: dict[str, Any]) -> None:
        self._worker.update_weights(info)

    def _finish_weight_update(self, version: int) -> list[Sums]:
        self._worker.finish_weight_update()
        return [self._worker.received.sums()]


def stand_in() -> None:
    """What vLLM needs of a machine and a job: once per process, before an `Engine` is made."""
    parallel_state._TP = parallel_state._PP = _ALONE  # type: ignore[assignment]
    nccl_engine.open_trainer_endpoint = lambda _: Communicator(0)
    nccl_engine.worker_init_process_group = lambda *_: Communicator(1)


def _be_cuda() -> None:
    """vLLM's CPU build packs weights for CPU kernels unless it takes itself for another.

    Not earlier: what is imported afterwards looks for operators that this build does not have.
    """
    type(current_platform)._enum = PlatformEnum.CUDA
