"""Tokens and model FLOPs per second of each phase, and their share of the devices' peak (MFU)."""

from __future__ import annotations

from collections.abc import Mapping

PASSES = {"rollout": 1, "old_log_probs": 1, "update": 3, "sft": 3}
"""Model FLOPs of a phase in forward passes; a backward pass counts as two."""
_TRAINED = ("tokens/trained", "tokens/trained_forward_tflop")
_WORK = {
    "rollout": ("tokens/model", "tokens/forward_tflop"),
    "old_log_probs": ("tokens/old_log_probs", "tokens/old_log_probs_tflop"),
}
"""Metrics with the tokens of a phase and the model FLOPs of a forward pass over them; default `_TRAINED`."""


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


def phase_peaks(per_device: float | None, *, trainers: int, engines: int) -> dict[str, float | None]:
    """Peak FLOP/s of the devices of each phase that uses any; None if the peak of one device is unknown."""
    devices = {phase: engines if phase == "rollout" else trainers for phase in PASSES}
    return {phase: None if per_device is None else per_device * count for phase, count in devices.items() if count}


def sft_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Record of a supervised step for `sft.jsonl`: `metrics` and their `throughput_metrics`."""
    names = {
        "sft/loss": "supervised/loss",
        "sft/epoch": "sft/epoch",
        "sft/grad_norm": "actor/grad_norm",
        "sft/bad_steps": "actor/bad_steps",
        "sft/overflow_steps": "actor/overflow_steps",
        "sft/loss_scale": "actor/loss_scale",
        "sft/lr": "actor/lr",
        "sft/seconds": "time/sft",
        "sft/tokens_per_s": "throughput/sft_tokens_per_s",
        "sft/model_tflops_per_s": "throughput/sft_model_tflops_per_s",
        "sft/mfu": "throughput/sft_mfu",
        "sft/trainer_peak_mib": "memory/trainer_peak_mib",
    }
    return {ours: metrics[theirs] for ours, theirs in names.items() if theirs in metrics}
