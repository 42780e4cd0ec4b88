"""Both sides of a transfer: the trainer of one rank as the pool calls it, and what a worker does with what arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from ctpo_megatron.base.tensor_rows import TensorRows
from ctpo_megatron.engines.tasks import UpdateReport
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, open_transport
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.tcp import FetchMessage, fetched
from tests.engines.pool_helpers import OneRank

Tensors = dict[str, torch.Tensor]


class Sender:
    def __init__(self, tensors: Tensors, facts: EngineFacts, settings: TransportSettings, pool: Any) -> None:
        self.tensors, self.shapes = tensors, tensors
        self.sends: Callable[[Tensors], Any] = dict.items
        if facts.transport != "tcp":
            from ctpo_megatron.engines.weights.client import WeightClient

            WeightClient._call = _called  # type: ignore[method-assign, assignment]
        self._transport = open_transport(OneRank(), facts, settings)

    def offer(self, version: int) -> Any:
        self._offer = self._transport.offer(self, version)
        return self._offer

    def transfer(self) -> None:
        self._offer.transfer()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.sends(self.tensors)

    def own_weights(self) -> Iterator[tuple[TensorRows, torch.Tensor]]:
        for (name, tensor), rows in zip(self.sends(self.tensors), self.own_weight_rows(), strict=True):
            yield rows, tensor

    def own_weight_rows(self) -> list[TensorRows]:
        return [TensorRows.whole(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.shapes.items()]

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.shapes.items()]

    def close(self) -> None:
        self._transport.close()


def _called(client: Any, method: str, arguments: Any = None) -> list[tuple[Any, Any]]:
    update: Any = client._update
    alive = [engine for engine in update.engines if engine not in update.failed]
    own = [() if arguments is None else (arguments[n],) for n in range(len(update.engines))]
    answers = []
    with ThreadPoolExecutor(4) as pool:
        jobs = [(engine, pool.submit(engine.run, method, *own[n])) for n, engine in enumerate(alive)]
        for engine, job in jobs:
            try:
                answers.append((engine, job.result()))
            except Exception as error:
                update.fail(engine, error)
    return answers


class Worker:
    def __init__(self, transport: str, model: Any) -> None:
        self.model, self._transport = model, transport
        if transport != "tcp":
            from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            made: Any = {"nccl": NCCLWeightTransferEngine, "ipc": IPCWeightTransferEngine}[transport]
            parts = SimpleNamespace(parallel_config=None, model_config=None)
            self.engine = made(None, parts, torch.device("cpu", 0), model)

    def begin(self) -> None:
        self.model.tensors.clear()

    def fetch(self, message: dict[str, Any], met: Callable[[], None]) -> None:
        coming = fetched(FetchMessage(**message))
        for number, (name, tensor) in enumerate(coming):
            if number == 1:
                met()
            self.model.load_weights([(name, tensor)])


def worker(transport: str, model: Any) -> Worker:
    return Worker(transport, model)


def report(of: Worker, version: int) -> UpdateReport:
    sums = Checksums(version, torch.float32)
    for name, tensor in of.model.tensors.items():
        sums.add(name, tensor)
    parts = [(name, "", False, whole) for name, (whole, _) in sums.sums.items()]
    return UpdateReport(str(version), parts)
