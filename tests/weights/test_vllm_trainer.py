"""vLLM's trainer and worker sides of its NCCL transport, with our source: real but for NCCL and CUDA's streams."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctpo_megatron.base.stop import NeverStop
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, open_transport
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.client import WeightClient
from tests.engines.pool_helpers import OneRank
from tests.support.deadlines import scaled

pytestmark = pytest.mark.slow  # vLLM takes eight seconds to import

TENSORS = {f"model.layers.{n}.weight": torch.randn(40, n + 1) for n in range(5)} | {"norm": torch.randn(7).bfloat16()}

BUCKET, BUCKETS = 300, [160 + 320, 480, 640, 800, 14]
"""Bytes of a bucket, and of what is sent at once: tensors until they exceed it, whatever the largest tensor has."""


class Source:
    """The policy's side; counts how often it was gone through to the end."""

    def __init__(self) -> None:
        self.passes = 0

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from TENSORS.items()
        self.passes += 1

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


class Communicator:
    """Stands for NCCL's: what rank zero broadcasts is copied by the others; records, and can be destroyed meanwhile."""

    def __init__(self, inboxes: list[Any], rank: int) -> None:
        self.inboxes, self.rank, self.destroyed = inboxes, rank, threading.Event()
        self.sent: list[int] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        if self.destroyed.is_set():
            return
        if self.rank == 0:
            self.sent.append(tensor.nbytes)
            for inbox in self.inboxes:
                inbox.put(tensor.clone())
        else:
            tensor.copy_(self.inboxes[self.rank - 1].get(timeout=scaled(20)))

    def destroy(self) -> None:
        self.destroyed.set()


class Model:
    """What a worker loads into."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.found |= {name: tensor.clone() for name, tensor in weights}


class Engine:
    """vLLM's worker side, without Ray: an engine handle and its process."""

    name, log_path = "engine", Path("engine.log")

    def __init__(self) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self.model = Model()
        made: Callable[..., Any] = NCCLWeightTransferEngine
        parts = SimpleNamespace(parallel_config=None, model_config=None)
        self.worker = made(None, parts, torch.device("cpu"), self.model)
        self.ready_ref = 1

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        self.worker.init_transfer_engine(self.worker.parse_init_info(info))

    def start_weight_update(self) -> None:
        """Nothing is frozen."""

    def receive_weights(self, info: dict[str, Any]) -> None:
        self.worker.receive_weights(self.worker.parse_update_info(info))

    def finish_weight_update(self, version: int) -> int:
        return version


class Update:
    """Of two engines: a `PendingUpdate` that keeps what it is told."""

    def __init__(self, offer: Any, engines: list[Engine]) -> None:
        self.offer, self.engines, self.stop = offer, engines, NeverStop()
        self.failed: dict[Any, Any] = {}
        self.reports: list[Any] = []
        offer.begin(self)

    def take(self, engine: Engine, report: Any) -> None:
        self.reports.append(report)

    def fail(self, engine: Engine, why: Any) -> None:
        self.failed[engine] = why


class Engines:
    """The calls of a client to two engines, in threads; the engine `dies` at call number `dies_in` of an update."""

    def __init__(self) -> None:
        self.all = [Engine(), Engine()]
        self.calls: list[str] = []
        self.dies_in = -1
        self._pool = ThreadPoolExecutor(2)

    def call(self, client: WeightClient, method: str, arguments: Any = None) -> list[tuple[Any, Any]]:
        self.calls.append(method)
        update: Any = client._update
        if method == "receive_weights" and self.calls.count(method) - 1 == self.dies_in:
            update.fail(self.all[1], "it died")
            self.all[1].ready_ref += 1
            time.sleep(1.0)  # rank zero would wait in a broadcast
            return []
        alive = [engine for engine in self.all if engine not in update.failed]
        own = [()] * 2 if arguments is None else [(argument,) for argument in arguments]
        jobs = [self._pool.submit(getattr(engine, method), *own[n]) for n, engine in enumerate(alive)]
        return [(engine, job.result()) for engine, job in zip(alive, jobs, strict=True)]


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Engines, list[Communicator]]:
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    made: list[Communicator] = []
    inboxes: list[Any] = []

    def trainer(info: Any) -> Communicator:
        assert info.world_size == 3 and info.master_address == "127.0.0.1" and info.master_port > 0
        inboxes[:] = [queue.Queue(), queue.Queue()]
        made.append(Communicator(inboxes, 0))
        return made[-1]

    def worker(info: Any, _config: Any) -> Communicator:
        assert info.rank_offset in (1, 2) and info.world_size == 3 and info.packed
        return Communicator(inboxes, info.rank_offset)

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", trainer)
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", worker)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda *_: (stream, stream))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    engines = Engines()
    monkeypatch.setattr(WeightClient, "_call", lambda *call: engines.call(*call))
    settings = TransportSettings(BUCKET, scaled(20))
    transport = open_transport(OneRank(), EngineFacts(torch.float32, "127.0.0.1", "nccl"), settings)
    return transport, engines, made


ROUND = ["start_weight_update", "receive_weights", "finish_weight_update"]


def test_both_engines_get_every_tensor_and_its_checksum(
    rehearsal: tuple[Any, Engines, list[Communicator]], recwarn: pytest.WarningsRecorder
) -> None:
    transport, engines, made = rehearsal
    source = Source()
    for version in (1, 2):
        offer = transport.offer(source, version)
        update = Update(offer, engines.all)
        offer.transfer()
        expected = Checksums(version, torch.float32)
        for name, tensor in TENSORS.items():
            expected.add(name, tensor)
            for engine in engines.all:
                assert engine.model.found[name].dtype == tensor.dtype
                assert torch.equal(engine.model.found[name], tensor)
        assert offer.sums == expected.sums and offer.names == TENSORS.keys() and not offer.kept
        assert offer.size == sum(tensor.nbytes for tensor in TENSORS.values())
        assert update.reports == [version, version] and not update.failed
    assert engines.calls == ["init_weight_transfer", *ROUND, *ROUND]
    assert source.passes == 2 and len(made) == 1
    assert made[0].sent == 2 * BUCKETS
    assert not [warning for warning in recwarn if "buffer_size_bytes" in str(warning.message)]
    transport.close()
    assert made[0].destroyed.is_set()


def test_a_new_group_after_an_engine_died(rehearsal: tuple[Any, Engines, list[Communicator]]) -> None:
    """The transfer is aborted, the source is gone through to the end (other ranks are in it), and all is sent again."""
    transport, engines, made = rehearsal
    source = Source()
    engines.dies_in = 0
    offer = transport.offer(source, 1)
    first = Update(offer, engines.all)
    offer.transfer()
    assert list(first.failed) == [engines.all[1]] and made[0].destroyed.is_set()
    second = Update(offer, engines.all)
    offer.transfer()
    assert not second.failed and second.reports == [1, 1]
    assert [communicator.destroyed.is_set() for communicator in made] == [True, False]
    assert engines.calls == ["init_weight_transfer", *ROUND] * 2
    assert source.passes == 2
    assert all(torch.equal(engines.all[1].model.found[name], tensor) for name, tensor in TENSORS.items())


def test_handles_of_gpu_memory_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuples with classes in them, which the engine's own serialization refuses: as vLLM's HTTP client sends them."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    class Recorder(WeightClient):
        def _call(self, method: str, arguments: Any = None) -> Any:
            self.asked = (method, arguments)
            return []

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    update: Any = SimpleNamespace(engines=[1])
    client = Recorder(1, 1.0)
    client.begin(update)
    handles = {"GPU-1": (torch.Tensor, torch.Size([3]), b"handle", torch.uint8)}
    names: dict[str, Any] = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[3]], "tensor_sizes": [12]}
    client.update_weights({**names, "ipc_handles": handles, "ipc_handles_pickled": None})
    method, [info] = client.asked
    assert method == "receive_weights"
    taken = IPCWeightTransferEngine.parse_update_info(SimpleNamespace(update_info_cls=_ipc_info()), info)  # type: ignore[arg-type]
    assert taken.ipc_handles == handles


def test_a_buffer_for_ipc_holds_the_largest_tensor() -> None:
    """vLLM refuses a tensor that does not fit."""
    for bucket, expected in ((BUCKET, 800), (1000, 1000)):
        transport: Any = open_transport(
            OneRank(), EngineFacts(torch.float32, "127.0.0.1", "ipc"), TransportSettings(bucket, 1.0)
        )
        assert transport._init_info(transport.offer(Source(), 1)).packed_buffer_size_bytes == expected


def _ipc_info() -> Any:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    return IPCWeightTransferUpdateInfo


def test_the_secret_of_an_update_is_not_shown() -> None:
    from ctpo_megatron.engines.weights.receiver import TcpUpdateInfo

    shown = repr(TcpUpdateInfo(shares=[], secret="5ec2e7", version=3, bucket_bytes=1, timeout_s=1.0))
    assert "version=3" in shown and "5ec2e7" not in shown
