"""What is read of a model's config.json, and the models that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.config import Config, ConfigError, read_spec, spec_for

Make = Callable[..., Config]

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "rope_theta": 1000000,
    "rope_scaling": None,
}
A3B = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": None}


def write_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    raw = {key: value for key, value in {**QWEN3, **changes}.items() if value != "drop"}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_spec_of_old_and_new_config_files(tmp_path: Path) -> None:
    old = read_spec(write_model(tmp_path))
    assert (old.head_dim, old.rope_theta, old.rope_scaling, old.dtype) == (128, 1e6, None, "bfloat16")
    assert (old.qk_norm, old.qkv_bias, old.tie_word_embeddings) == (True, False, True)
    new = {"rope_theta": "drop", "rope_scaling": "drop", "torch_dtype": "drop", "dtype": "bfloat16"}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    assert read_spec(write_model(tmp_path, **new, rope_parameters=rope)) == old


def test_spec_of_the_other_families(tmp_path: Path) -> None:
    qwen2 = read_spec(write_model(tmp_path, architectures=["Qwen2ForCausalLM"]))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 80)
    mistral = read_spec(write_model(tmp_path, **MISTRAL, num_key_value_heads="drop"))
    assert (mistral.num_key_value_heads, mistral.head_dim, mistral.qk_norm) == (8, 80, False)
    llama = read_spec(write_model(tmp_path, architectures=["LlamaForCausalLM"], rope_scaling=LLAMA3))
    assert (llama.qkv_bias, llama.rope_scaling) == (False, LLAMA3)
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    for hidden in ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}):
        spec = read_spec(write_model(tmp_path, **linear, **hidden))
        assert (spec.rope_scaling, spec.rope_theta) == ({"rope_type": "linear", "factor": 2.0}, 1e6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": {"0": "Qwen3ForCausalLM"}}, "architecture None is not supported"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "architecture ['Qwen3ForCausalLM'] is not supported"),
        (
            # transformers 5 drops `rope_parameters` for this
            {"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope type 'yarn' is not supported",
        ),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 8.0}}, "llama3 rope scaling with {'high_freq_factor': 8.0}"),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096},
            "llama3 rope scaling with {'original_max_position_embeddings': 4096}",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "default rotary embedding with {'full_attent"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1}}, "rotary embedding with {'mscale': 1}"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25 is not supported"),
        ({"rope_parameters": [1]}, "rope_parameters [1] is no JSON object"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta None is no positive number"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope type ['linear'] is not supported"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0 is no positive number"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0 is no positive integer"),
        ({"num_attention_heads": -32}, "has no positive integer 'num_attention_heads'"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' has no factor"),
        ({"num_hidden_layers": "drop"}, "has no positive integer 'num_hidden_layers'"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"logit_scale": 0.5}, "logit_scale 0.5 is not supported: vLLM obeys it, and the trainer does not"),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config {'chunk_size': 1} is not"),
        ({"is_causal": False}, "is_causal False is not supported"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        (MISTRAL | {"sliding_window": 4096}, "sliding-window attention is not supported"),
        (MISTRAL | {"sliding_window": "drop"}, "sliding-window attention is not supported"),  # transformers' default
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention is not supported"),
        (A3B | {"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than its 128 experts"),
        (A3B | {"num_experts_per_tok": 1}, "norm_topk_prob with one expert per token gives the router no gradient"),
        (A3B | {"num_experts": "128"}, "gives no num_experts"),
    ],
)
def test_unsupported_models(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match="1 problem") as caught:
        read_spec(write_model(tmp_path, **changes))
    assert expected in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_missing_model(config_with: Make) -> None:
    for path, said in (
        ("nowhere", 'model.path = "nowhere": no such directory; give a directory'),
        ("Qwen/Qwen3-4B", "hf download Qwen/Qwen3-4B --local-dir"),
        ("data/toolmath/model", "; python -m examples.toolmath data/toolmath writes it"),
    ):
        with pytest.raises(ConfigError, match=said):
            spec_for(config_with(f"model.path={path}"))


def test_broken_model_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file"):
        read_spec(tmp_path)
    for content, said in ((b"{\n oops", ":2: not valid JSON"), (b'{"a": "\xff"}', ": not valid JSON: 'utf-8' codec")):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=f"config.json{said}"):
            read_spec(tmp_path)


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path, **A3B))
    assert (spec.num_experts, spec.num_experts_per_token, spec.moe_intermediate_size) == (128, 8, 768)
    assert spec.norm_topk_prob and spec.qk_norm
    assert read_spec(write_model(tmp_path, **A3B | {"num_experts": "drop", "num_local_experts": 128})) == spec


def test_experts_that_are_not_supported_are_all_named(tmp_path: Path) -> None:
    changes = {"num_experts": "drop", "moe_intermediate_size": "drop", "mlp_only_layers": [0]}
    with pytest.raises(ConfigError, match="3 problems") as caught:
        read_spec(write_model(tmp_path, **A3B | changes))
    for expected in ("gives no num_experts", "gives no moe_intermediate_size", "dense layers among the layers"):
        assert expected in str(caught.value)
