"""Tokens and model FLOPs per second of each phase, and their share of the devices' peak (MFU)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ctpo_megatron.tracking.known_metrics import KNOWN_METRICS

PASSES = {"rollout": 1, "old_log_probs": 1, "update": 3, "sft": 3}
"""Model FLOPs of a phase in forward passes; a backward pass counts as two."""
_TRAINED = ("tokens/trained", "tokens/trained_forward_tflop")
_WORK = {
    "rollout": ("tokens/model", "tokens/forward_tflop"),
    "old_log_probs": ("tokens/old_log_probs", "tokens/old_log_probs_tflop"),
}
"""Metrics with the tokens of a phase and the model FLOPs of a forward pass over them; default `_TRAINED`."""

# Dense peaks in TFLOP/s (bfloat16 and TF32 on tensor cores without sparsity, float32 outside of them), from NVIDIA's
# data sheets. The first row whose name is part of the device's name counts, so longer names come before shorter ones.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("GB200", {"bfloat16": 2500.0, "tf32": 1250.0, "float32": 80.0}),
    ("B200", {"bfloat16": 2250.0, "tf32": 1125.0, "float32": 75.0}),
    ("GH200", {"bfloat16": 989.4, "tf32": 494.7, "float32": 66.9}),
    ("H200 NVL", {"bfloat16": 835.5, "tf32": 417.5, "float32": 60.0}),
    ("H200", {"bfloat16": 989.4, "tf32": 494.7, "float32": 66.9}),
    ("H100 NVL", {"bfloat16": 835.5, "tf32": 417.5, "float32": 60.0}),
    ("H100 PCIe", {"bfloat16": 756.0, "tf32": 378.0, "float32": 51.2}),
    ("H100", {"bfloat16": 989.4, "tf32": 494.7, "float32": 66.9}),
    ("A100", {"bfloat16": 312.0, "tf32": 156.0, "float32": 19.5}),
    ("L40S", {"bfloat16": 362.1, "tf32": 183.2, "float32": 91.6}),
    ("L40", {"bfloat16": 181.1, "tf32": 90.5, "float32": 90.5}),
    ("L4", {"bfloat16": 121.0, "tf32": 60.0, "float32": 30.3}),
    ("A10G", {"bfloat16": 70.0, "tf32": 35.0, "float32": 31.5}),
    ("A10", {"bfloat16": 125.0, "tf32": 62.5, "float32": 31.2}),
)


def throughput_metrics(metrics: Mapping[str, float], peaks: Mapping[str, float | None]) -> dict[str, float]:
    """`throughput/<phase>_*` of the phases timed in `metrics`; see docs/reference/metrics.md.

    metrics: of one step, with `time/<phase>` (seconds), `tokens/*` and `tokens/forward_tflop`. peaks: FLOP/s of all
    devices of a phase, by phase; None (as on a CPU): no MFU. Other phases are omitted.
    """
    found: dict[str, float] = {}
    for phase, peak in peaks.items():
        names = (f"time/{phase}", *_WORK.get(phase, _TRAINED))
        seconds, tokens, tflop = (metrics.get(name) for name in names)
        if not seconds or not tokens or tflop is None:
            continue
        rate = PASSES[phase] * tflop / seconds
        found |= {f"throughput/{phase}_tokens_per_s": tokens / seconds, f"throughput/{phase}_model_tflops_per_s": rate}
        if peak is not None:
            found[f"throughput/{phase}_mfu"] = rate * 1e12 / peak
    return found


def peak_flops(device_name: str | None, precision: str) -> float | None:
    """Dense peak of a device in FLOP/s; None for a CPU and for a GPU that is not in the table.

    precision: `bfloat16`, `float16` (tensor cores are as fast in both), `float32`, or `tf32` for float32 parameters
    whose products run on tensor cores.
    """
    if device_name is None:
        return None
    precision = "bfloat16" if precision == "float16" else precision
    found = (peaks for name, peaks in _PEAKS if re.search(rf"\b{name}\b", device_name))
    return next((peaks[precision] * 1e12 for peaks in found), None)


def phase_peaks(per_device: float | None, *, trainers: int, engines: int) -> dict[str, float | None]:
    """Peak FLOP/s of the devices of each phase that uses any; None if the peak of one device is unknown."""
    devices = {phase: engines if phase == "rollout" else trainers for phase in PASSES}
    return {phase: None if per_device is None else per_device * count for phase, count in devices.items() if count}


def sft_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Record of a supervised step for `sft.jsonl`: `metrics` and their `throughput_metrics`."""
    return {row.name: metrics[row.source] for row in KNOWN_METRICS if row.source in metrics}
