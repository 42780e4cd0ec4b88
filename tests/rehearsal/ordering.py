"""What the rules of streams have to see and to let pass, each a function that a pretending rank runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.policy.device import DeviceMemory
from tests.rehearsal.allocator import Allocator, Gpu
from tests.rehearsal.streams import UnorderedAccess, here

SIZE = 1 << 20


def _tensor() -> torch.Tensor:
    return torch.ones(SIZE, device="cuda")


def _on(stream: torch.cuda.Stream, action: Callable[[], object]) -> None:
    with torch.cuda.stream(stream):
        action()


def _read_early() -> None:
    tensor = _tensor()
    _on(torch.cuda.Stream(), lambda: tensor + 1)


def _write_before_a_read_is_over() -> None:
    tensor, stream = _tensor(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    _on(stream, lambda: tensor + 1)
    tensor.zero_()


def _view_written_early() -> None:
    tensor = _tensor()
    _on(torch.cuda.Stream(), lambda: tensor.view(2, -1)[0].mul_(2))


def _freed(*, recorded: bool) -> None:
    """Another stream still reads memory that is taken again."""
    _read_and_drop(torch.cuda.Stream(), recorded=recorded)
    _tensor()


def _read_and_drop(stream: torch.cuda.Stream, *, recorded: bool) -> None:
    tensor = _tensor()
    stream.wait_stream(torch.cuda.current_stream())
    _on(stream, lambda: tensor + 1)
    if recorded:
        tensor.record_stream(stream)


def _gathered(*, waited: bool) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    tensor = _tensor()
    work = dist.all_reduce(tensor, async_op=True)
    if waited:
        work.wait()
    _ = tensor + 1
    dist.destroy_process_group()


def _weights() -> None:
    """As with `overlap_param_gather`: the current stream alone waits for the gather, and vLLM reads on two others."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    tensor = _tensor()
    work = dist.all_reduce(tensor, async_op=True)
    model: Any = SimpleNamespace(finish_param_gather=work.wait)
    with DeviceMemory(PolicyConfig(), model).weights_complete():
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            _on(stream, lambda: tensor + 1)
    dist.destroy_process_group()


def _waits(how: str) -> None:
    tensor, stream = _tensor(), torch.cuda.Stream()
    match how:
        case "stream":
            stream.wait_stream(torch.cuda.current_stream())
        case "event":
            stream.wait_event(torch.cuda.current_stream().record_event())
        case "host":
            torch.cuda.synchronize()
        case "host, for the stream":
            torch.cuda.current_stream().synchronize()
        case "host, for a number":
            tensor[0].item()
    _on(stream, lambda: tensor + 1)


def _checksums() -> None:
    """Two streams in turn, as vLLM's producer has them: the second reads tables that the first has made."""
    tensor, sums = _tensor(), Checksums()
    torch.cuda.synchronize()
    for number, stream in enumerate((torch.cuda.Stream(), torch.cuda.Stream())):
        _on(stream, lambda number=number: sums.add(f"weight {number}", tensor))


REFUSED: dict[str, Callable[[], object]] = {
    "read early": _read_early,
    "write before a read is over": _write_before_a_read_is_over,
    "view written early": _view_written_early,
    "memory taken again": lambda: _freed(recorded=False),
    "collective": lambda: _gathered(waited=False),
}
ALLOWED: dict[str, Callable[[], object]] = {
    **{f"{how} waits": lambda how=how: _waits(how) for how in ("stream", "event", "host", "host, for the stream")},
    "a number waits": lambda: _waits("host, for a number"),
    "memory recorded": lambda: _freed(recorded=True),
    "collective waited for": lambda: _gathered(waited=True),
    "checksums": _checksums,
    "weights": _weights,
}


def refusals() -> dict[str, str]:
    """What each of REFUSED raised; nothing where it passed."""
    here().memory = Allocator(Gpu())
    found = {}
    for name, action in REFUSED.items():
        try:
            action()
        except UnorderedAccess as error:
            found[name] = str(error)
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def allow() -> list[str]:
    """Run ALLOWED to the end."""
    here().memory = Allocator(Gpu())
    passed = []
    for name, action in ALLOWED.items():
        action()
        torch.cuda.synchronize()  # or the next one takes memory that a stream still reads
        passed.append(name)
    return passed
