"""Collectives that are not waited for at once run on a stream of their own, as NCCL's do; gloo computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from tests.rehearsal import streams
from tests.rehearsal.streams import Event, Process, Stream

_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "alltoall_base",
)
_streams: dict[tuple[Process, str], Stream] = {}
_under_way: dict[int, tuple[Any, Event]] = {}
"""By id of the work, which is kept so that no other has it."""


def install() -> None:
    """Once per process."""
    for name in _METHODS:
        setattr(c10d.ProcessGroup, name, _on_own_stream(getattr(c10d.ProcessGroup, name)))
    c10d.Work.wait = _waited_for(c10d.Work.wait)


def _on_own_stream(original: Any) -> Any:
    def call(group: Any, *arguments: Any, **named: Any) -> Any:
        options = [o for o in (*arguments, *named.values()) if hasattr(o, "asyncOp")]
        if options and not options[0].asyncOp:
            return original(group, *arguments, **named)
        key = streams.here(), group.group_name
        stream = _streams.get(key) or _streams.setdefault(key, Stream(name=f"NCCL stream {len(_streams)}"))
        stream.wait_stream(streams.current())
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            work = original(group, *arguments, **named)
        _under_way[id(work)] = work, stream.record_event()
        return work

    return call


def _waited_for(original: Any) -> Any:
    def wait(work: Any, *arguments: Any) -> Any:
        done = original(work, *arguments)
        if (found := _under_way.pop(id(work), None)) is not None:
            streams.current().wait_event(found[1])
        return done

    return wait
