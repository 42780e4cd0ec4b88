"""What torch's profiler says of one update: launches a layer, copies from the host, and where the host waits."""

from __future__ import annotations

from typing import Any

from torch.autograd import DeviceType
from torch.profiler import profile

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WAITS = ("cudaMemcpyAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls in which the host may wait; of `cudaMemcpyAsync` for a copy from pageable memory."""
FROM_HOST, PAGEABLE = "Memcpy HtoD", "Pageable -> Device"
TOP = 10


def figures(profiler: profile, layers: int) -> dict[str, Any]:
    """Counts, and seconds; operators instead of kernels where no GPU is.

    layers: passes through a layer, forward and backward as one: layers times micro-batches.
    """
    events = profiler.key_averages()
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    on_host = {event.key: event for event in events if event.device_type == DeviceType.CPU}
    operators = [event for name, event in on_host.items() if name.startswith("aten::")]
    result: dict[str, Any] = {"operators_per_layer": sum(event.count for event in operators) / layers}
    if not on_device:
        top = sorted(operators, key=lambda event: -event.self_cpu_time_total)[:TOP]
        return result | {"top_operators_s": {event.key: event.self_cpu_time_total / 1e6 for event in top}}
    copies = [event for event in on_device if event.key.startswith(FROM_HOST)]
    result["launches_per_layer"] = sum(on_host[name].count for name in LAUNCHES if name in on_host) / layers
    result["copies_from_host"] = sum(event.count for event in copies)
    result["copies_from_pageable"] = sum(event.count for event in copies if PAGEABLE in event.key)
    waits = {name: on_host[name] for name in WAITS if name in on_host}
    result["host_in_s"] = {name: event.self_cpu_time_total / 1e6 for name, event in waits.items()}
    result["host_in_calls"] = {name: event.count for name, event in waits.items()}
    result["kernels_s"] = sum(event.self_device_time_total for event in on_device) / 1e6
    top = sorted(on_device, key=lambda event: -event.self_device_time_total)[:TOP]
    return result | {"top_kernels_s": {event.key[:80]: event.self_device_time_total / 1e6 for event in top}}
