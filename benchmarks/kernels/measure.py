"""Time, peak memory, launches and host synchronisations of calls, and a record of what could not run."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], object]

COMPILER = {"cuda": "inductor", "cpu": "eager"}
"""torch.compile's backend: on a CPU only tracing is exercised, a C++ compiler is not."""

SAMPLE_SECONDS = 0.4
"""Time spent on the samples of one pass; each call is timed in two passes."""

GRAPH_CALLS = 20
"""Least calls in one CUDA graph, so that its replay is long enough to time; all sets of inputs take part."""

MAX_COPIES = 256


class NotRun(Exception):
    """A rival cannot run here; the text says why."""


class Session:
    """One run of the suites on one device: ceilings, records and the time that is left."""

    def __init__(self, device: str, *, quick: bool, deadline_s: float) -> None:
        self.device, self.quick = device, quick
        self.cuda = device == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.records: list[dict[str, Any]] = []
        self.ceilings: dict[str, float] = {}
        self._end = time.monotonic() + deadline_s

    def seconds_left(self) -> float:
        """Until the deadline."""
        return self._end - time.monotonic()

    def copies(self, bytes_each: int) -> int:
        """Sets of inputs to rotate through, so that no call finds its inputs in the L2 cache."""
        if not self.cuda:
            return 2
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        return max(1, min(MAX_COPIES, math.ceil(2 * cache / max(1, bytes_each))))

    def measure(
        self,
        suite: str,
        case: str,
        side: str,
        build: Callable[[], Sequence[Call]],
        *,
        ours: bool = False,
        flops: float = 0,
        bytes_moved: float = 0,
        subtract: int = 0,
        graph: bool = False,
        count: bool = False,
    ) -> dict[str, Any]:
        """Record one side of one case.

        build: makes the calls, each on inputs of its own; what it raises is recorded, as "not run" for a rival and as
        "failed" for a side of ours. flops, bytes_moved: of one call, for the roofline. subtract: bytes of results that
        the peak does not count. graph: time the replay of a CUDA graph too. count: launches and host synchronisations.
        """
        record: dict[str, Any] = {"suite": suite, "case": case, "side": side, "ours": ours}
        self.records.append(record)
        if self.seconds_left() <= 0:
            record["not_run"] = "deadline"
            return record
        try:
            calls = build()
            record |= self._peak(calls[0], subtract)
            record |= self._time(calls)
            if graph and self.cuda:
                record["graph_s"] = self._graph_time(calls)
            if count and self.cuda:
                record["launches"], record["syncs"] = launches(calls[0]), host_syncs(calls[0])
        except Exception as error:
            # One side that cannot run must not take the others along; it stays in the table with its reason.
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            record["failed" if ours else "not_run"] = str(error) if isinstance(error, NotRun) else reason
            if ours:
                record["traceback"] = traceback.format_exc()
        else:
            record |= {"flops": flops, "bytes": bytes_moved}
        self.release()
        return record

    def find(self, suite: str, case: str, side: str) -> dict[str, Any]:
        """The record, or an empty one."""
        for record in self.records:
            if (record["suite"], record["case"], record["side"]) == (suite, case, side):
                return record
        return {}

    def release(self) -> None:
        """Give memory of the side before back."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _peak(self, call: Call, subtract: int) -> dict[str, Any]:
        # The first call compiles and sets up libraries, which may keep workspaces.
        call()
        if not self.cuda:
            return {}
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return {"peak_bytes": max(0, torch.cuda.max_memory_allocated() - before - subtract)}

    def _time(self, calls: Sequence[Call]) -> dict[str, Any]:
        for call in calls:
            call()
        self._synchronize()
        start = time.perf_counter()
        calls[0]()
        self._synchronize()
        once = time.perf_counter() - start
        repeats = 2 if self.quick else max(3, min(50, int(SAMPLE_SECONDS / max(once, 1e-6))))
        passes = [self._samples(calls, repeats) for _ in range(2)]
        medians = [statistics.median(samples) for samples in passes]
        # Where a call is long, launching it from the host no longer counts.
        walls = [once]
        for i in range(min(repeats, 7) if once < 0.02 else 0):
            start = time.perf_counter()
            calls[i % len(calls)]()
            self._synchronize()
            walls.append(time.perf_counter() - start)
        return {
            "seconds": statistics.median(passes[0] + passes[1]),
            "medians": medians,
            "wall_s": statistics.median(walls),
        }

    def _samples(self, calls: Sequence[Call], repeats: int) -> list[float]:
        if not self.cuda:
            samples = []
            for i in range(repeats):
                start = time.perf_counter()
                calls[i % len(calls)]()
                samples.append(time.perf_counter() - start)
            return samples
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for i, (begin, end) in enumerate(events):
            begin.record()
            calls[i % len(calls)]()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]

    def _graph_time(self, calls: Sequence[Call]) -> float:
        """Seconds a call inside a replayed graph: no launch from the host enters."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls[:3]:
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph, number = torch.cuda.CUDAGraph(), max(GRAPH_CALLS, len(calls))
        with torch.cuda.graph(graph):
            for i in range(number):
                calls[i % len(calls)]()
        return statistics.median(self._samples([graph.replay], 30)[5:]) / number

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def launches(call: Call) -> int | None:
    """Kernels, copies and fills that one call puts on the device; None where the profiler sees nothing of them."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    # Nothing here runs without a kernel: 0 means that device activities may not be traced.
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()) or None


def host_syncs(call: Call) -> int:
    """Operations of one call that wait for the device."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # Switching the mode on warns, too, once in a process: of "synchronizing operations" that it may miss.
    return sum("called a synchronizing" in str(entry.message) for entry in caught)
