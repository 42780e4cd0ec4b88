"""What the checks need to know about the model, read from its Hugging Face config.json without any model library."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_megatron.config.problems import NO_VALUE, ConfigError, Problem
from ctpo_megatron.config.schema import Config, TinyModelConfig

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")
_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron-Core fixes these numbers of the llama3 scaling; only `factor` is free."""
_ROPE_KEYS = {"default": (), "linear": ("factor",), "llama3": ("factor", *_LLAMA3)}
"""What a rotary embedding of each type may say of itself, besides `rope_type`, `rope_theta` and a factor of 1."""


@dataclass(frozen=True)
class ModelFacts:
    """Shape of a decoder model.

    vocab_size: rows of the embedding; 0 while `prepare` has not built the tokenizer that decides it.
    rope_scaling: None, or `rope_type` ("linear" or "llama3") with its numbers, e.g. `factor`.
    num_experts: 0 for a dense model; else every layer has so many, `num_experts_per_token` of them active, each of
        width `moe_intermediate_size`. norm_topk_prob: the weights of the active ones add up to 1.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    vocab_size: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    rope_scaling: Mapping[str, Any] | None = None
    dtype: str = "float32"
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    @classmethod
    def read(cls, path: str | Path) -> ModelFacts:
        """Facts of the model in a directory. Raises ConfigError with everything unsupported at once."""
        file = Path(path) / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            fix = "model.path must be a directory in Hugging Face format"
            raise ConfigError(
                [Problem("model.path", f"cannot read {file}: {error.strerror}", fix, str(path))]
            ) from error
        except json.JSONDecodeError as error:
            raise ConfigError([Problem("model.path", f"{file}:{error.lineno}: not valid JSON: {error.msg}")]) from error
        problems = _problems(raw, str(file))
        if problems:
            raise ConfigError(problems)
        return cls._from_json(raw)

    @classmethod
    def _from_json(cls, raw: Mapping[str, Any]) -> ModelFacts:
        architecture, heads, rope = raw["architectures"][0], raw["num_attention_heads"], _rope(raw)
        return cls(
            architecture=architecture,
            num_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or _default_head_dim(raw),
            intermediate_size=raw["intermediate_size"],
            max_position_embeddings=raw["max_position_embeddings"],
            vocab_size=raw["vocab_size"],
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM",  # in its code; no key says so
            qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.pop("rope_theta")),
            rope_scaling=rope if rope["rope_type"] != "default" else None,
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            **_experts(raw),
        )

    @classmethod
    def of_tiny(cls, model: TinyModelConfig) -> ModelFacts:
        """Facts of the model that `prepare` is going to build."""
        return cls(
            architecture="Qwen3ForCausalLM",
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            intermediate_size=model.intermediate_size,
            max_position_embeddings=model.max_position_embeddings,
            vocab_size=0,
            tie_word_embeddings=model.tie_word_embeddings,
            qk_norm=True,
            rope_theta=model.rope_theta,
        )


def facts_for(config: Config) -> ModelFacts:
    """Facts of `model.path`, or of the model that `prepare` will build there. Raises ConfigError."""
    path = Path(config.model.path)
    if will_be_prepared(config, path) and not (path / "config.json").exists():
        return ModelFacts.of_tiny(config.prepare.model)  # type: ignore[union-attr]
    if not path.is_dir():
        fix = "give a directory in Hugging Face format"
        if config.prepare is not None:
            fix += f", or {Path(config.prepare.directory) / 'model'} which `prepare` builds"
        elif config.model.path.count("/") == 1 and not path.is_absolute():
            fix += f"; a Hub model first: hf download {config.model.path} --local-dir DIRECTORY"
        raise ConfigError([Problem("model.path", "no such directory", fix, config.model.path)])
    return ModelFacts.read(path)


def will_be_prepared(config: Config, path: Path) -> bool:
    """Whether `prepare` writes this path: model/ or one of its three parquet files."""
    if config.prepare is None:
        return False
    root = Path(config.prepare.directory)
    return path.absolute() in {(root / n).absolute() for n in PREPARED}


PREPARED = ("model", "train.parquet", "heldout.parquet", "sft.parquet")
"""What `prepare` puts into its directory."""


def _default_head_dim(raw: Mapping[str, Any]) -> int:
    """transformers' own default: 128 for Qwen3, else the hidden size split over the heads."""
    return 128 if raw["architectures"][0] == "Qwen3ForCausalLM" else raw["hidden_size"] // raw["num_attention_heads"]


def _experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a mixture of experts, from the keys of transformers 5 (`num_local_experts`) or 4."""
    if raw["architectures"][0] != "Qwen3MoeForCausalLM":
        return {}
    return {
        "num_experts": raw.get("num_experts") or raw.get("num_local_experts") or 0,
        "num_experts_per_token": raw.get("num_experts_per_tok") or 0,
        "moe_intermediate_size": raw.get("moe_intermediate_size") or 0,
        "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
    }


def _expert_reasons(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Why a mixture of experts is not supported, each with what is."""
    experts = _experts(raw)
    counts = {name: experts[name] for name in ("num_experts", "num_experts_per_token", "moe_intermediate_size")}
    missing = [name for name, count in counts.items() if not _is_count(count)]
    found = [(f"gives no {name}", "config.json must give it") for name in missing]
    active = counts["num_experts_per_token"]
    if not missing and active > counts["num_experts"]:
        found.append((f"num_experts_per_tok {active} is more than its {counts['num_experts']} experts", "lower it"))
    if active == 1 and experts["norm_topk_prob"]:
        # The one weight, renormalized, is 1 whatever the router says: it would never learn.
        message = "norm_topk_prob with one expert per token gives the router no gradient"
        found.append((message, "supported: norm_topk_prob false, or num_experts_per_tok 2 or more"))
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        found.append(
            ("dense layers among the layers of experts are not supported", "supported: experts in every layer")
        )
    return found


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rope base, type and numbers as transformers 5 takes them, whose `rope_scaling` replaces `rope_parameters`."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope = {"rope_theta": raw.get("rope_theta", 1e4), **given}
    old_name = rope.pop("type", "default")
    return {"rope_type": old_name, **rope}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _problems(raw: Any, file: str) -> list[Problem]:
    """Everything in a config.json that the trainer would refuse or, worse, train differently from the engine."""

    def problem(message: str, fix: str = "", value: Any = NO_VALUE) -> Problem:
        return Problem("model.path", message, fix, value, where=file)

    if not isinstance(raw, dict):
        return [problem("config.json must hold a JSON object")]
    architecture = (raw.get("architectures") or [None])[0]
    if architecture not in ARCHITECTURES:
        return [problem(f"architecture {architecture} is not supported", f"supported: {', '.join(ARCHITECTURES)}")]
    found = [problem(f"has no positive integer {name!r}") for name in _REQUIRED if not _is_count(raw.get(name))]
    found += [problem(*reason) for reason in (*_head_reasons(raw), *_rope_reasons(raw))]
    if not _is_number(raw.get("rms_norm_eps", 1e-6)):
        found.append(problem(f"rms_norm_eps {raw['rms_norm_eps']!r} is no positive number"))
    if architecture == "Qwen3MoeForCausalLM":
        found += [problem(*reason) for reason in _expert_reasons(raw)]
    if raw.get("hidden_act", "silu") != "silu":
        found.append(problem(f"activation {raw['hidden_act']!r} is not supported", "supported: silu"))
    found += [problem(f"{name} is not supported") for name in ("mlp_bias", "attention_bias") if raw.get(name)]
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        found.append(problem("sliding-window attention is not supported", "the trainer would attend to everything"))
    if raw.get("quantization_config"):
        found.append(problem("quantized weights cannot be trained", "use the unquantized model"))
    return found


def _head_reasons(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Why the attention heads cannot be built."""
    heads, groups, width = (raw.get(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    found = [
        (f"{name} {value!r} is no positive integer", "leave it out for transformers' default")
        for name, value in (("num_key_value_heads", groups), ("head_dim", width))
        if value is not None and not _is_count(value)
    ]
    if not found and groups and _is_count(heads) and heads % groups:
        found.append((f"num_key_value_heads {groups} does not divide num_attention_heads {heads}", ""))
    return found


def _rope_reasons(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Why a rotary embedding is not supported, each with what is."""
    for name in ("rope_scaling", "rope_parameters"):
        if raw.get(name) is not None and not isinstance(raw[name], dict):
            return [(f"{name} {raw[name]!r} is no JSON object", "leave it out for plain rotary embedding")]
    rope = _rope(raw)
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        return [(f"rope type {kind!r} is not supported", f"supported: {', '.join(_ROPE_KEYS)}")]
    found = []
    if not _is_number(rope["rope_theta"]):
        found.append((f"rope_theta {rope['rope_theta']!r} is no positive number", ""))
    for where in (raw, rope):
        if where.get("partial_rotary_factor") not in (None, 1):
            message = f"partial_rotary_factor {where['partial_rotary_factor']!r} is not supported"
            found.append((message, "supported: 1, every channel of a head is rotated"))
    known = {"rope_type", "rope_theta", "partial_rotary_factor", *_ROPE_KEYS[kind]}
    if unknown := {name: value for name, value in rope.items() if name not in known}:
        found.append((f"{kind} rotary embedding with {unknown} is not supported", "one for all layers is"))
    if kind != "default" and not _is_number(rope.get("factor")):
        found.append((f"rope type {kind!r} has no factor", "config.json must give a positive number"))
    if kind == "llama3":
        # transformers lets this one stand beside the others, and there it wins
        beside = {name: raw[name] for name in ("original_max_position_embeddings",) if name in raw}
        other = {name: (rope | beside).get(name) for name in _LLAMA3}
        if other := {name: value for name, value in other.items() if value != _LLAMA3[name]}:
            found.append((f"llama3 rope scaling with {other} is not supported", f"supported: {_LLAMA3}"))
    return found
