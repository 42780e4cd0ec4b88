"""What vLLM's own transports are told: buckets, group, handles. What becomes of an update: `test_scenarios.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, open_transport
from tests.weights.fleet import BUCKET, Communicator, Fleet, pretending
from tests.weights.sides import ONE_RANK, manifest_of

pytestmark = pytest.mark.slow  # vLLM takes eight seconds to import

TENSORS = {f"model.layers.{n}.weight": torch.randn(40, n + 1) for n in range(5)} | {"norm": torch.randn(7).bfloat16()}
BUCKETS = [160 + 320, 480, 640, 800, 14]
"""Bytes of what is sent at once: tensors until they exceed a bucket, whatever the largest tensor has."""


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretending(monkeypatch):
        yield


def test_a_bucket_of_nccl_is_no_larger_than_configured(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    fleet = Fleet(tmp_path, "nccl", 20.0)
    for version in (1, 2):
        fleet.send(TENSORS, version)
    [communicator] = Communicator.made  # the group stays as long as its members
    assert communicator.sent == 2 * BUCKETS
    assert not [warning for warning in recwarn if "buffer_size_bytes" in str(warning.message)]
    fleet.close()
    assert communicator.destroyed.is_set()


def test_a_buffer_for_ipc_holds_the_largest_tensor() -> None:
    """vLLM refuses a tensor that does not fit."""
    for bucket, expected in ((BUCKET, 800), (1000, 1000)):
        facts, settings = EngineFacts(torch.float32, "127.0.0.1", "ipc"), TransportSettings(bucket, 1.0)
        transport: Any = open_transport(ONE_RANK, facts, settings, manifest_of(TENSORS), None)
        assert transport._init_info(1).packed_buffer_size_bytes == expected


def test_handles_of_gpu_memory_arrive_as_they_were() -> None:
    """Tuples with classes in them, which the engine's own serialization refuses: as vLLM's HTTP client sends them."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    told: list[Any] = []
    pool: Any = SimpleNamespace(lead=lambda method, arguments, _: told.append((method, *arguments(0))))
    handles = {"GPU-1": (torch.Tensor, torch.Size([3]), b"handle", torch.uint8)}
    names: dict[str, Any] = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[3]], "tensor_sizes": [12]}
    facts, settings = EngineFacts(torch.float32, "127.0.0.1", "ipc"), TransportSettings(BUCKET, 1.0)
    transport: Any = open_transport(ONE_RANK, facts, settings, manifest_of(TENSORS), pool)
    transport.update_weights({**names, "ipc_handles": handles, "ipc_handles_pickled": None})
    [(method, info)] = told
    assert method == "receive_weights" and IPCWeightTransferUpdateInfo(**info).ipc_handles == handles


def test_the_secret_of_an_update_is_not_shown() -> None:
    from ctpo_megatron.engines.weights.receiver import TcpUpdateInfo

    shown = repr(TcpUpdateInfo(servers=[], secret="5ec2e7", version=3, timeout_s=1.0))
    assert "version=3" in shown and "5ec2e7" not in shown
