"""An engine pool whose engines are threads of this process, with the trainer of one rank that sends them weights.

Real are the pool, its handles but for Ray, the transports, and both sides of vLLM's own transports. Stand-ins are the
model that a worker loads into, NCCL's communicator, and CUDA's handles of memory.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, RayError

from ctpo_megatron.base.event_loop import EventLoop, end
from ctpo_megatron.engines import EngineHandle, EnginePool, EngineSpec
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings
from tests.engines.pool_helpers import make_config
from tests.support.deadlines import scaled
from tests.weights.sides import Fetching, Sender, begin, report, worker

BUCKET = 300
"""Bytes of a bucket: no more than a few of the tensors."""
Tensors = dict[str, torch.Tensor]


class Model:
    """What a worker loads into."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}

    def load_weights(self, weights: Any) -> None:
        self.tensors |= {name: tensor.clone() for name, tensor in weights}


class Process:
    """An engine's process: what `RolloutEngine` and vLLM's worker do with weights.

    meets: is called while it receives. changed: a tensor that has changed on its way.
    """

    def __init__(self, transport: str) -> None:
        self.model, self.version, self.calls = Model(), 0, list[str]()
        self.dead, self.meets, self.changed = threading.Event(), nothing_happens, ""
        self._worker = worker(transport, self.model)

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        self.calls.append("init_weight_transfer")
        self._worker.init_transfer_engine(self._worker.parse_init_info(info))

    def start_weight_update(self) -> None:
        self.calls.append("start_weight_update")
        begin(self._worker)

    def receive_weights(self, info: dict[str, Any]) -> None:
        self.calls.append("receive_weights")
        if isinstance(self._worker, Fetching):
            return self._worker.fetch(info, lambda: self.meets(self))
        self.meets(self)
        self._worker.receive_weights(self._worker.parse_update_info(info))

    def finish_weight_update(self, version: int) -> Any:
        self.calls.append("finish_weight_update")
        self.version = version
        return report(self._worker, self.changed)

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")


def nothing_happens(process: Process) -> None:
    """While it receives."""


def die(process: Process) -> None:
    """As an actor whose process is gone."""
    process.dead.set()
    raise ActorDiedError


class Engine(EngineHandle):
    """The handle of an engine that is a thread of this process."""

    def __init__(self, index: int, spec: EngineSpec) -> None:
        super().__init__(index, spec)
        self.process, self._threads = Process(spec.transport), ThreadPoolExecutor(4)

    async def start(self) -> None:
        self.facts = EngineFacts(torch.float32, "127.0.0.1", self._spec.transport)

    def end(self) -> None:
        super().end()
        self.process.dead.set()

    def call(self, method: str, *arguments: Any) -> Any:
        return asyncio.get_running_loop().run_in_executor(self._threads, self.run, method, *arguments)

    def run(self, method: str, *arguments: Any) -> Any:
        """What an actor returns or raises."""
        if self.process.dead.is_set():
            raise ActorDiedError
        try:
            return getattr(self.process, method)(*arguments)
        except RayError:
            raise
        except Exception as error:
            raise RayError(repr(error)) from error


class Pool(EnginePool):
    """A pool of such engines."""

    def _new(self, index: int) -> Engine:
        return Engine(index, self._spec)


class Stop:
    """A stop signal that a test sets."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def is_set(self) -> bool:
        return self.asked.is_set()

    def ask(self, cause: str) -> None:
        self.asked.set()


class Fleet:
    """Two engines of a pool, and the trainer that sends them weights."""

    def __init__(self, folder: Path, transport: Any, timeout_s: float) -> None:
        mode = "colocated" if transport == "ipc" else "disaggregated"
        weights = {"transport": transport, "timeout_s": timeout_s}
        config = make_config(folder, folder, engines=2, weights=weights, sections={"placement": {"mode": mode}})
        self.transport, self.stop, self.loop = transport, Stop(), EventLoop()
        self.pool = Pool(config, "unused", self.loop, stop=self.stop)
        self.pool._spec = replace(self.pool._spec, transport=transport)
        self.pool._start = self.loop.begin(self.pool._begin_all())  # without Ray
        self.facts, self.settings = self.pool.wait_ready(), TransportSettings(BUCKET, timeout_s)
        self.trainer: Any = None

    @property
    def engines(self) -> list[Any]:
        return self.pool.engines

    def begin(self, tensors: Tensors, version: int, sends: Callable[[Tensors], Any] | None = None) -> None:
        """Returns when the trainer may change its weights. sends: what it sends in place of these tensors."""
        if self.trainer is None:
            self.trainer = Sender(tensors, self.facts, self.settings, self.pool)
        self.trainer.tensors = tensors
        self.trainer.sends = sends or dict.items
        self.pool.send(self.trainer, version)

    def send(self, tensors: Tensors, version: int) -> None:
        """Returns when all engines have them."""
        self.begin(tensors, version)
        self.pool.finish_update()

    def holds(self, engine: int, tensors: Tensors, version: int) -> bool:
        """Whether an engine has these tensors, bit for bit and in their dtypes, and their version."""
        process = self.engines[engine].process
        have = process.model.tensors
        same = have.keys() == tensors.keys() and all(
            have[name].dtype == tensor.dtype and torch.equal(have[name], tensor) for name, tensor in tensors.items()
        )
        return same and process.version == self.engines[engine].version == version

    @property
    def live(self) -> list[bool]:
        return [engine.live for engine in self.engines]

    @property
    def calls(self) -> list[list[str]]:
        return [engine.process.calls for engine in self.engines]

    def close(self) -> None:
        for engine in self.engines:
            engine.process.dead.set()
        if self.trainer is not None:
            self.trainer.close()
        if self.pool._update is not None:
            self.loop.call(end([self.pool._update.task]))
        self.loop.__exit__(None, None, None)


class Communicator:
    """Stands for NCCL's: what rank zero broadcasts is copied by the others; records, and can be destroyed meanwhile."""

    made: list[Communicator]
    """Of rank zero, in the order in which they were made."""
    inboxes: list[queue.Queue[torch.Tensor]]

    def __init__(self, rank: int) -> None:
        self._inboxes, self._rank, self.destroyed = Communicator.inboxes, rank, threading.Event()
        self.sent: list[int] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        if self.destroyed.is_set():
            return
        if self._rank == 0:
            self.sent.append(tensor.nbytes)
            for inbox in self._inboxes:
                inbox.put(tensor.clone())
        else:
            tensor.copy_(self._inboxes[self._rank - 1].get(timeout=scaled(5)))

    def destroy(self) -> None:
        self.destroyed.set()


class Torch:
    """torch, as modules of vLLM see it that want a GPU."""

    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(
        is_available=lambda: False,
        stream=lambda _: nullcontext(),
        current_stream=lambda: Torch.stream,
        get_device_properties=lambda _: SimpleNamespace(uuid="GPU-0"),
        synchronize=lambda: None,
        ipc_collect=lambda: None,
    )
    accelerator = SimpleNamespace(current_device_index=lambda: 0)

    def empty(self, *size: int, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def pretending(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's modules find a GPU, a communicator and handles of memory."""
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor

    handles: dict[int, torch.Tensor] = {}

    def exported(tensor: torch.Tensor) -> Any:
        handles[len(handles)] = tensor
        return None, (len(handles) - 1, *[0] * 6)

    def of_trainer(info: Any) -> Communicator:
        assert info.master_address == "127.0.0.1" and info.master_port > 0
        Communicator.inboxes = [queue.Queue() for _ in range(info.world_size - 1)]
        Communicator.made.append(Communicator(0))
        joining.set()
        return Communicator.made[-1]

    def of_worker(info: Any, _config: Any) -> Communicator:
        assert info.packed and joining.wait(scaled(10))
        return Communicator(info.rank_offset)

    joining, Communicator.made = threading.Event(), []
    patch.setattr(nccl_engine, "open_trainer_endpoint", of_trainer)
    patch.setattr(nccl_engine, "worker_init_process_group", of_worker)
    patch.setattr(packed_tensor, "_get_streams", lambda *_: (Torch.stream, Torch.stream))
    patch.setattr(packed_tensor, "reduce_tensor", exported)
    patch.setattr(reductions, "rebuild_cuda_tensor", lambda number, *_: handles[number])
    patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    for module in (packed_tensor, ipc_engine, nccl_engine):
        patch.setattr(module, "torch", Torch())
    yield
