"""Rotary position embedding: reads config.json, refuses what is not supported, and gives Megatron's options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ctpo_megatron.models.spec import ModelSpec, Refusal, is_positive

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron-Core fixes these numbers of the llama3 scaling; only `factor` is free."""
_EXTENDING = ("yarn", "longrope", "dynamic")
"""Types that extend a model's context beyond what it was first trained for."""
_KEYS = {"default": (), "linear": ("factor",), "llama3": ("factor", *_LLAMA3)}
"""Keys allowed for each type of rotary embedding, in addition to `rope_type`, `rope_theta` and a factor of 1."""


def read_rotary(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rope base, type and parameters as in transformers 5, where `rope_scaling` overrides `rope_parameters`."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope = {"rope_theta": raw.get("rope_theta", 1e4), **given}
    old_name = rope.pop("type", "default")
    return {"rope_type": old_name, **rope}


def rotary_options(spec: ModelSpec) -> dict[str, Any]:
    """Keyword arguments of Megatron's GPTModel."""
    scaling = spec.rope_scaling or {}
    factor = float(scaling.get("factor", 8.0))
    return {
        "position_embedding_type": "rope",
        "rotary_base": spec.rope_theta,
        "rope_scaling": scaling.get("rope_type") == "llama3",
        "rope_scaling_factor": factor,
        "seq_len_interpolation_factor": factor if scaling.get("rope_type") == "linear" else None,
    }


def rotary_refusals(raw: Mapping[str, Any]) -> Iterator[Refusal]:
    """Unsupported properties of a rotary embedding, each with what is supported."""
    for name in ("rope_scaling", "rope_parameters"):
        if raw.get(name) is not None and not isinstance(raw[name], dict):
            yield Refusal(f"{name} {raw[name]!r} is no JSON object", "leave it out for plain rotary embedding")
            return
    rope = read_rotary(raw)
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in _KEYS:
        fix = f"supported: {', '.join(_KEYS)}"
        if kind in _EXTENDING:
            fix += "; for sequences within the original positions remove it, with max_position_embeddings set to those"
        yield Refusal(f"rope type {kind!r} is not supported", fix)
        return
    if not is_positive(rope["rope_theta"]):
        yield Refusal(f"rope_theta {rope['rope_theta']!r} is no positive number")
    for where in (raw, rope):
        if where.get("partial_rotary_factor") not in (None, 1):
            message = f"partial_rotary_factor {where['partial_rotary_factor']!r} is not supported"
            yield Refusal(message, "supported: 1, every channel of a head is rotated")
    known = {"rope_type", "rope_theta", "partial_rotary_factor", *_KEYS[kind]}
    if unknown := {name: value for name, value in rope.items() if name not in known}:
        yield Refusal(f"{kind} rotary embedding with {unknown} is not supported", "one for all layers is")
    if kind != "default" and not is_positive(rope.get("factor")):
        yield Refusal(f"rope type {kind!r} has no factor", "config.json must give a positive number")
    if kind == "llama3":
        # transformers accepts this key next to the others, and gives it precedence
        beside = {name: raw[name] for name in ("original_max_position_embeddings",) if name in raw}
        other = {name: (rope | beside).get(name) for name in _LLAMA3}
        if other := {name: value for name, value in other.items() if value != _LLAMA3[name]}:
            yield Refusal(f"llama3 rope scaling with {other} is not supported", f"supported: {_LLAMA3}")
