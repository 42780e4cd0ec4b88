"""Model FLOPs of a decoder, and the peak FLOP/s of the device."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.data import TokenSequence
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.policy import device

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


def forward_flops(spec: ModelSpec, tokens: int, predicted: int) -> float:
    """FLOPs of the matrix products of one forward pass over a sequence; the backward pass needs twice that.

    tokens: length of the sequence. predicted: rows of the output layer, one per response token. Model FLOPs in the
    sense of MFU (Chowdhery et al., arXiv 2204.02311, appendix B). They exclude recomputation, padding, and everything
    but matrix products (norms, softmax, rotary embedding, optimizer). With L layers, width H, h heads and g key-value
    heads of width d, MLP width I, vocabulary V, and T tokens of which P are predicted:

        L * T * (2 H (h + 2 g) d + 2 h d H + 6 H I)   projections and gated MLP
        L * 2 T (T + 1) h d                           causal attention: T (T + 1) / 2 pairs, two products of width d
        P * 2 H V                                     output layer

    In a mixture of experts 6 H I becomes 6 H I_e k + 2 H E: k active experts of width I_e, and the router over E.
    """
    layers = spec.num_layers * spec.family.layer_flops(spec, tokens)
    return float(layers + predicted * 2 * spec.hidden_size * spec.vocab_size)


def sequence_flops(spec: ModelSpec, sequences: Iterable[TokenSequence]) -> list[float]:
    """`forward_flops` of each sequence: the cost estimate for balancing ranks."""
    return [forward_flops(spec, s.length, s.sampled_tokens) for s in sequences]


def peak_flops(policy: PolicyConfig) -> float | None:
    """Dense peak of this rank's device in FLOP/s, in the policy's compute precision; None if unknown."""
    return known_peak(device.device_name(), device.product_precision(policy.dtype))


def known_peak(device_name: str | None, precision: str) -> float | None:
    """Dense peak of a device in FLOP/s; None for a CPU and for a GPU that is not in the table.

    precision: `bfloat16`, `float32`, or `tf32` for float32 parameters whose products run on tensor cores.
    """
    if device_name is None:
        return None
    found = (peaks for name, peaks in _PEAKS if re.search(rf"\b{name}\b", device_name))
    return next((peaks[precision] * 1e12 for peaks in found), None)
