"""vLLM's trainer and worker sides of its NCCL transport, with our source: real but for NCCL and CUDA's streams."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctpo_megatron.engines.weights import EngineFacts
from ctpo_megatron.engines.weights.checksums import Checksums, Sums
from tests.engines.pool_helpers import OneRank
from tests.support.deadlines import scaled

pytestmark = pytest.mark.slow  # vLLM takes eight seconds to import

TENSORS = {f"model.layers.{n}.weight": torch.randn(40, n + 1) for n in range(5)} | {"norm": torch.randn(7).bfloat16()}


class Source:
    """The policy's side; counts how often it was gone through to the end."""

    def __init__(self) -> None:
        self.passes = 0

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from TENSORS.items()
        self.passes += 1

    own_weights = weights

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


class Communicator:
    """Stands for NCCL's: what rank zero broadcasts is copied by the others; records, and can be destroyed meanwhile."""

    def __init__(self, inboxes: list[Any], rank: int) -> None:
        self.inboxes, self.rank, self.sent, self.destroyed = inboxes, rank, 0, threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        if self.destroyed.is_set():
            return
        if self.rank == 0:
            self.sent += tensor.nbytes
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


class Engines:
    """Two engines of one worker each, as `EngineClient`: vLLM's worker side in threads, without Ray."""

    workers = 2

    def __init__(self, group: Callable[[int], Communicator]) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._group, self._pool = group, ThreadPoolExecutor(2)
        self.models = [Model(), Model()]
        made: Callable[..., Any] = NCCLWeightTransferEngine
        parts = SimpleNamespace(parallel_config=None, model_config=None)
        self.engines = [made(None, parts, torch.device("cpu"), model) for model in self.models]
        self.members: tuple[object, ...] = (1, 1)
        self.calls: list[str] = []
        self.dies_in = -1
        self.failed = False

    def engine_facts(self) -> EngineFacts:
        return EngineFacts(torch.float32, "127.0.0.1")

    def begin(self, version: int, sums: Callable[[], Sums], failed: Callable[[], None]) -> None:
        self.version, self.sums, self.on_failure, self.failed = version, sums, failed, False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        infos = [init_info | {"rank_offset": init_info["rank_offset"] + number} for number in range(2)]
        for engine, info in zip(self.engines, infos, strict=True):
            engine.init_transfer_engine(engine.parse_init_info(info))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        if len([call for call in self.calls if call == "update"]) - 1 == self.dies_in:
            self.failed = True
            return self.on_failure()
        infos = [engine.parse_update_info(update_info) for engine in self.engines]
        list(self._pool.map(lambda pair: pair[0].receive_weights(pair[1]), zip(self.engines, infos, strict=True)))
        return None

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        self.agreed = self.sums()

    def settle(self, began: float, size: int) -> bool:
        assert size == sum(tensor.nbytes for tensor in TENSORS.values())
        if self.failed:
            self.members = (1, 2)
        return not self.failed


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Engines, list[Communicator]]:
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    from ctpo_megatron.engines.weights.vllm import VllmTransport

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
    engines = Engines(lambda rank: Communicator(inboxes, rank))
    transport = VllmTransport(OneRank(), 0, engines, "nccl", bucket_bytes=300, timeout_s=scaled(20))
    transport.init()
    return transport, engines, made


def test_both_engines_get_every_tensor_and_its_checksum(rehearsal: tuple[Any, Engines, list[Communicator]]) -> None:
    transport, engines, made = rehearsal
    source = Source()
    for version in (1, 2):
        transport.send(source, version)
        expected = Checksums(version, torch.float32)
        for name, tensor in TENSORS.items():
            expected.add(name, tensor)
            for model in engines.models:
                assert model.found[name].dtype == tensor.dtype and torch.equal(model.found[name], tensor)
        assert engines.agreed == expected.sums
    assert engines.calls == ["init", "start", "update", "finish", "start", "update", "finish"]
    assert source.passes == 2 and len(made) == 1
    assert made[0].sent == 2 * sum(tensor.nbytes for tensor in TENSORS.values())
    transport.close()
    assert made[0].destroyed.is_set()


def test_a_new_group_after_an_engine_died(rehearsal: tuple[Any, Engines, list[Communicator]]) -> None:
    """The transfer is aborted, the source is gone through to the end (other ranks are in it), and all is sent again."""
    transport, engines, made = rehearsal
    source = Source()
    engines.dies_in = 0
    transport.send(source, 1)
    assert [communicator.destroyed.is_set() for communicator in made] == [True, False]
    assert engines.calls == ["init", "start", "update", "finish", "init", "start", "update", "finish"]
    assert source.passes == 2
    assert all(torch.equal(engines.models[1].found[name], tensor) for name, tensor in TENSORS.items())
    engines.dies_in = 2
    engines.update_weights = lambda _: (setattr(engines, "failed", True), engines.on_failure())[0]  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="weights 2 reached not all engines in 2 attempts"):
        transport.send(source, 2)


def test_handles_of_gpu_memory_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuples with classes in them, which the engine's own serialization refuses: as vLLM's HTTP client sends them."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    from ctpo_megatron.engines import WeightClient

    class Recorder(WeightClient):
        def _all(self, method: str, arguments: Any = None) -> Any:
            self.asked = (method, arguments)
            return []

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    fleet: Any = SimpleNamespace(engines=[1])
    client = Recorder(fleet, 1, 1.0)
    handles = {"GPU-1": (torch.Tensor, torch.Size([3]), b"handle", torch.uint8)}
    names: dict[str, Any] = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[3]], "tensor_sizes": [12]}
    client.update_weights({**names, "ipc_handles": handles, "ipc_handles_pickled": None})
    method, [[info]] = client.asked
    assert method == "receive_weights"
    taken = IPCWeightTransferEngine.parse_update_info(SimpleNamespace(update_info_cls=_ipc_info()), info)  # type: ignore[arg-type]
    assert taken.ipc_handles == handles


def _ipc_info() -> Any:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    return IPCWeightTransferUpdateInfo


def test_the_secret_of_an_update_is_not_shown() -> None:
    from ctpo_megatron.engines.weights.receiver import TcpUpdateInfo

    shown = repr(TcpUpdateInfo(shares=[], secret="5ec2e7", version=3, bucket_bytes=1, timeout_s=1.0))
    assert "version=3" in shown and "5ec2e7" not in shown
