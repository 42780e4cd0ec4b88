"""`torch.cuda` and NCCL of a machine that has neither, as far as training asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.rehearsal import collectives, gpu_memory, streams
from tests.rehearsal.claims import current, launch, named, place, resize, unchecked
from tests.rehearsal.claims import memory as memory_of
from tests.rehearsal.streams import here, note

_CAPABILITY = (9, 0)
_MEMORY = 80 << 30
BACKENDS = "cpu:gloo,cuda:nccl"


class Properties:
    name, multi_processor_count, warp_size, total_memory = "a pretended GPU", 132, 32, _MEMORY
    major, minor = _CAPABILITY

    def __init__(self, index: int) -> None:
        self.uuid = f"GPU-{index}"


class Generator:
    """The state of a GPU's random stream; the numbers themselves come from the CPU's."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def get_state(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)

    def graphsafe_get_state(self) -> torch.Generator:
        return self.generator

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self.generator = state

    clone_state = graphsafe_get_state

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)


_generator = Generator()


def _select(device: Any) -> None:
    here().index = named(device).index


def _properties(device: Any = None) -> Properties:
    return Properties(here().index if device is None else named(device).index)


def _memory(name: str) -> Any:
    """A figure of this process; 0 where memory is not counted."""

    def read(*_: Any) -> int:
        memory = here().memory
        return 0 if memory is None else memory.settled() if name == "allocated" else memory.reserved

    return read


def _empty_cache() -> None:
    if (memory := here().memory) is not None:
        memory.empty_cache()


def _record_stream(tensor: torch.Tensor, _: Any) -> None:
    if (memory := memory_of(tensor)) is not None:
        memory.record_stream()


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[None]:
    """As torch's, by functions that may be replaced: vLLM notes what is set."""
    before = torch.cuda.current_stream()
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def _resized(original: Any) -> Any:
    def resize_(storage: Any, size: int) -> Any:
        original(storage, size)
        resize(storage)
        return storage

    return resize_


def _exchange(device: int) -> int:
    """Select a GPU and return the one before; -1 changes nothing."""
    before = here().index
    if device < 0:
        return -1
    here().index = device
    return before


def _functions(devices: int) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function, **_: function(),
        "device_count": lambda: devices,
        "current_device": lambda: here().index,
        "set_device": _select,
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "get_device_name": lambda *_: Properties.name,
        "get_device_capability": lambda *_: _CAPABILITY,
        "get_device_properties": _properties,
        "synchronize": streams.synchronize,
        "empty_cache": _empty_cache,
        "ipc_collect": gpu_memory.collect,
        "mem_get_info": lambda *_: (_MEMORY, _MEMORY),
        "memory_allocated": _memory("allocated"),
        "memory_reserved": _memory("reserved"),
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "current_stream": streams.current,
        "default_stream": streams.default,
        "set_stream": streams.select,
        "stream": _stream,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "default_generators": (_generator,) * devices,
    }


_RANDOM = {
    "get_rng_state": lambda *_, **__: _generator.get_state(),
    "set_rng_state": lambda state, *_, **__: _generator.set_state(state),
    "manual_seed": lambda seed: _generator.manual_seed(seed),
    "manual_seed_all": lambda seed: _generator.manual_seed(seed),
}


_ACCELERATOR = {
    "is_available": lambda: True,
    "current_accelerator": lambda *_, **__: torch.device("cuda"),
    "current_device_index": lambda: here().index,
    "set_device_index": _select,
    "current_stream": streams.current,
    "set_stream": streams.select,
    "synchronize": streams.synchronize,
    "empty_cache": _empty_cache,
}
"""Of `torch.accelerator`, which a CUDA build of torch would answer by itself."""


def _typed(name: str) -> Any:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        note(f"torch.cuda.{name}")
        with unchecked():
            made = getattr(torch, name)(*args, **kwargs)
        place(made, current())
        launch(name, writes=[made])
        return made

    return make


def _open(original: Any) -> Any:
    def init_process_group(backend: str, **keywords: Any) -> None:
        if backend != BACKENDS:
            raise ValueError(f"a CUDA machine wants {BACKENDS}: objects travel by gloo, tensors by NCCL; got {backend}")
        original("gloo", **keywords)

    return init_process_group


def _flat(original: Any) -> Any:
    """NCCL asks for as many numbers as all ranks give, gloo for their shape as well."""

    def all_gather_into_tensor(out: torch.Tensor, part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(out.view(-1), part.view(-1), *args, **kwargs)

    return all_gather_into_tensor


def install(devices: int) -> None:
    """Put all of it in place; once per process, before anything looks whether there is CUDA."""
    for name, value in (_functions(devices) | _RANDOM).items():
        setattr(torch.cuda, name, value)
    for name, value in _RANDOM.items():
        setattr(torch.cuda.random, name, value)
    torch.cuda.random.current_device = torch.cuda.memory.current_device = torch.cuda.current_device  # type: ignore[attr-defined]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None  # type: ignore[assignment]
    for name in (
        "FloatTensor",
        "DoubleTensor",
        "HalfTensor",
        "BFloat16Tensor",
        "LongTensor",
        "IntTensor",
        "ByteTensor",
    ):
        setattr(torch.cuda, name, _typed(name))
    dist.init_process_group = _open(dist.init_process_group)
    dist.all_gather_into_tensor = _flat(dist.all_gather_into_tensor)
    torch.Tensor.record_stream = _record_stream  # type: ignore[assignment, method-assign]
    torch.UntypedStorage.resize_ = _resized(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
    torch.cuda.memory.empty_cache = _empty_cache
    torch._C._cuda_clearCublasWorkspaces = lambda: None  # type: ignore[attr-defined]
    for name, value in (_ACCELERATOR | {"device_count": lambda: devices}).items():
        setattr(torch.accelerator, name, value)
    collectives.install()
    gpu_memory.install()
