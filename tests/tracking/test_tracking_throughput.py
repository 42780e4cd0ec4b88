"""Throughput follows from times, tokens and FLOPs; utilization only where a peak is known."""

from __future__ import annotations

import pytest

from ctpo_megatron.tracking import peak_flops, phase_peaks, sft_metrics, throughput_metrics

STEP = {
    "time/rollout": 4.0,
    "time/old_log_probs": 0.5,
    "time/update": 2.0,
    "tokens/model": 1000.0,
    "tokens/total": 4000.0,
    "tokens/forward_tflop": 8.0,
    "tokens/trained": 3000.0,
    "tokens/trained_forward_tflop": 6.0,
    "tokens/old_log_probs": 2000.0,
    "tokens/old_log_probs_tflop": 4.0,
}


def test_every_phase_has_its_tokens_and_passes() -> None:
    assert throughput_metrics(STEP, phase_peaks(None, trainers=4, engines=2)) == {
        "throughput/rollout_tokens_per_s": 250.0,
        "throughput/rollout_model_tflops_per_s": 2.0,
        "throughput/old_log_probs_tokens_per_s": 4000.0,
        "throughput/old_log_probs_model_tflops_per_s": 8.0,
        "throughput/update_tokens_per_s": 1500.0,
        "throughput/update_model_tflops_per_s": 9.0,
    }


def test_utilization_refers_to_the_devices_of_the_phase() -> None:
    found = throughput_metrics(STEP, phase_peaks(10e12, trainers=4, engines=2))
    assert found["throughput/rollout_mfu"] == pytest.approx(2.0 / 20)
    assert found["throughput/old_log_probs_mfu"] == pytest.approx(8.0 / 40)
    assert found["throughput/update_mfu"] == pytest.approx(9.0 / 40)


@pytest.mark.parametrize(
    ("step", "engines", "absent", "present"),
    [
        (STEP, 0, "rollout", "update"),  # a replay
        (STEP | {"tokens/old_log_probs": 0.0}, 2, "old_log_probs", "update"),  # its phase has the time of packing
        ({"val/toolmath/acc/mean@1": 0.5, "time/eval": 2.0}, 1, "", None),
        ({"time/checkpoint": 1.0, "time/update": 2.0}, 1, "", None),
    ],
)
@pytest.mark.parametrize("per_device", [None, 10e12])
def test_what_was_not_done_has_no_speed(
    step: dict[str, float], engines: int, absent: str, present: str | None, per_device: float | None
) -> None:
    found = throughput_metrics(step, phase_peaks(per_device, trainers=4, engines=engines))
    assert not [name for name in found if absent in name]
    assert present is None or found[f"throughput/{present}_model_tflops_per_s"] == 9.0


def test_a_supervised_step_has_its_own_names() -> None:
    metrics = {
        "time/sft": 0.5,
        "tokens/trained": 1000.0,
        "tokens/trained_forward_tflop": 0.25,
        "supervised/loss": 1.5,
        "actor/grad_norm": 2.0,
        "actor/bad_steps": 0.0,
        "actor/lr": 1e-3,
        "memory/trainer_peak_mib": 512.0,
    }
    found = sft_metrics(metrics | throughput_metrics(metrics, phase_peaks(3e12, trainers=1, engines=1)))
    assert found == {
        "sft/loss": 1.5,
        "sft/grad_norm": 2.0,
        "sft/bad_steps": 0.0,
        "sft/lr": 1e-3,
        "sft/seconds": 0.5,
        "sft/tokens_per_s": 2000.0,
        "sft/model_tflops_per_s": 1.5,
        "sft/mfu": 0.5,
        "sft/trainer_peak_mib": 512.0,
    }


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA L40S", "bfloat16", 362.1),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA RTX A1000", "float32", None),
        (None, "float32", None),
    ],
)
def test_the_peak_follows_from_the_name(name: str | None, precision: str, tflops: float | None) -> None:
    assert peak_flops(name, precision) == (None if tflops is None else tflops * 1e12)
