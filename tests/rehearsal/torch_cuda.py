"""`torch.cuda` and NCCL of a machine that has neither, as far as training asks for them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from tests.rehearsal.claims import State, current, place, unchecked
from tests.rehearsal.synchronizations import note

_CAPABILITY = (9, 0)
_MEMORY = 80 << 30
BACKENDS = "cpu:gloo,cuda:nccl"


class Properties:
    name, multi_processor_count, warp_size, total_memory = "a pretended GPU", 132, 32, _MEMORY
    major, minor = _CAPABILITY


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        note("Event.synchronize")


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> Event:
        return Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note("Stream.synchronize")


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
_stream = Stream()


def _select(device: Any) -> None:
    State.index = torch.device(device).index or 0 if not isinstance(device, int) else device


def _exchange(device: int) -> int:
    """Select a GPU and return the one before; -1 changes nothing."""
    before = State.index
    if device < 0:
        return -1
    State.index = device
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
        "current_device": lambda: State.index,
        "set_device": _select,
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "get_device_name": lambda *_: Properties.name,
        "get_device_capability": lambda *_: _CAPABILITY,
        "get_device_properties": lambda *_: Properties,
        "synchronize": lambda *_: note("torch.cuda.synchronize"),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "mem_get_info": lambda *_: (_MEMORY, _MEMORY),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "current_stream": lambda *_: _stream,
        "default_stream": lambda *_: _stream,
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "default_generators": (_generator,) * devices,
    }


_RANDOM = {
    "get_rng_state": lambda *_, **__: _generator.get_state(),
    "set_rng_state": lambda state, *_, **__: _generator.set_state(state),
    "manual_seed": lambda seed: _generator.manual_seed(seed),
    "manual_seed_all": lambda seed: _generator.manual_seed(seed),
}


def _typed(name: str) -> Any:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        note(f"torch.cuda.{name}")
        with unchecked():
            return place(getattr(torch, name)(*args, **kwargs), current())

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
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment] # it would refuse our streams
