"""vLLM's NCCL producer reads our policy's weights, on streams of its own, only after everything that wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import Trainer, device, hf
from ctpo_megatron.policy.memory import DeviceMemory

pytestmark = pytest.mark.slow  # vLLM takes eight seconds to import

NAMES = [f"layers.{number}" for number in range(6)]
GATHER = "gather"


class Streams:
    """Books of the streams of a device. Each holds what its next operation comes after; `host`: what all come after."""

    def __init__(self) -> None:
        self.host: set[str] = set()
        self.made: list[Stream] = []
        self.current = Stream(self)

    def synchronize(self) -> None:
        for stream in self.made:
            self.host |= stream.before

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        former, self.current = self.current, stream
        yield
        self.current = former

    def ordered_after(self, what: str) -> bool:
        return what in self.current.before | self.host


class Stream:
    def __init__(self, books: Streams) -> None:
        self.before: set[str] = set()
        self._books = books
        books.made.append(self)

    def synchronize(self) -> None:
        self._books.host |= self.before


class GatheringModel:
    """As megatron-core with `overlap_param_gather`: the current stream alone waits for the collective."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def finish_param_gather(self) -> None:
        self._streams.current.before.add(GATHER)


class Gathering(Trainer):
    """The policy with the model above, on no device."""

    def __init__(self, streams: Streams) -> None:
        self._model: Any = GatheringModel(streams)
        self._memory = DeviceMemory(PolicyConfig(), self._model)
        self.layout: Any = None


class Group:
    """Stands for NCCL's communicator."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """The bytes go nowhere."""


def test_every_stream_of_the_producer_reads_after_the_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import packed_tensor

    streams, early, read = Streams(), list[str](), list[str]()

    def export(*_: object, own_stage: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name in NAMES:
            (read if streams.ordered_after(GATHER) else early).append(name)
            yield name, torch.zeros(64, 64, dtype=torch.bfloat16)

    for owner, name, stand_in in (
        (torch.cuda, "Stream", lambda *_, **__: Stream(streams)),
        (torch.cuda, "stream", streams.use),
        (torch.accelerator, "current_device_index", lambda: 0),
        (device, "synchronize", streams.synchronize),
        (hf, "export", export),
    ):
        monkeypatch.setattr(owner, name, stand_in)
    packed_tensor._get_streams.cache_clear()
    tensors = Gathering(streams).weights()
    packed_tensor.packed_nccl_broadcast_producer(
        tensors, Group(), 0, lambda item: item[1], buffer_size_bytes=8192, num_buffers=2
    )
    assert len(streams.made) == 3  # the producer has used both of its own
    assert (early, read) == ([], NAMES)
