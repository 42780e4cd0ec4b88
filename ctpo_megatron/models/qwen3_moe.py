"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ctpo_megatron.models import mapping
from ctpo_megatron.models.family import LayerSplit, ModelFamily
from ctpo_megatron.models.mapping import ParamMapping
from ctpo_megatron.models.spec import ModelSpec, Refusal, is_count


class Qwen3Moe(ModelFamily):
    """Every token goes to `num_experts_per_token` experts, weighted by a softmax over the router's scores."""

    architecture = "Qwen3MoeForCausalLM"
    default_key_value_heads = 4
    qk_norm = True

    def read(self, raw: Mapping[str, Any]) -> ModelSpec:
        return replace(super().read(raw), **_experts(raw))

    def refusals(self, raw: Mapping[str, Any]) -> Iterator[Refusal]:
        yield from super().refusals(raw)
        experts = _experts(raw)
        counts = {name: experts[name] for name in ("num_experts", "num_experts_per_token", "moe_intermediate_size")}
        missing = [name for name, count in counts.items() if not is_count(count)]
        yield from (Refusal(f"gives no {name}", "config.json must give it") for name in missing)
        active = counts["num_experts_per_token"]
        if not missing and active > counts["num_experts"]:
            yield Refusal(f"num_experts_per_tok {active} is more than its {counts['num_experts']} experts", "lower it")
        if active == 1 and experts["norm_topk_prob"]:
            # A single renormalized weight is always 1, so the router would never learn.
            message = "norm_topk_prob with one expert per token gives the router no gradient"
            yield Refusal(message, "supported: norm_topk_prob false, or num_experts_per_tok 2 or more")
        if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
            message = "dense layers among the layers of experts are not supported"
            yield Refusal(message, "supported: experts in every layer")

    def mlp(self, spec: ModelSpec) -> Iterator[ParamMapping]:
        h, width = spec.hidden_size, spec.moe_intermediate_size
        yield mapping.replicated(("pre_mlp_layernorm.weight",), "post_attention_layernorm.weight", (h,))
        yield mapping.replicated(("mlp.router.weight",), "mlp.gate.weight", (spec.num_experts, h))
        gate, up, down = (f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down"))
        shapes = ((width, h), (width, h))
        yield mapping.gate_and_up(_megatron("linear_fc1"), (gate, up), shapes, per_expert=True)
        yield mapping.row_parallel(_megatron("linear_fc2"), down, (h, width), per_expert=True)

    def mlp_activations(self, spec: ModelSpec, split: LayerSplit) -> dict[str, int]:
        """Experts are assumed to be used evenly."""
        h, p, t = spec.hidden_size, split.element, split.tensor
        # With sequence parallelism a rank routes its share of the tokens; an expert receives tokens of all tensor
        # ranks.
        rows, width = spec.num_experts_per_token, spec.moe_intermediate_size // t
        routing = 3 * 4 * spec.num_experts // (t if split.sequence_parallel else 1)  # float32 logits, probs, map
        return {
            "moe": routing + rows * 2 * h * p + 2 * rows * width * p,  # rows in, rows out, gate and up
            "moe_act": rows * width * p,
        }

    def transformer_options(self, spec: ModelSpec) -> dict[str, Any]:
        return super().transformer_options(spec) | {
            "num_moe_experts": spec.num_experts,
            "moe_router_topk": spec.num_experts_per_token,
            "moe_ffn_hidden_size": spec.moe_intermediate_size,
            # Softmax over the selected experts equals softmax over all experts, renormalized.
            "moe_router_pre_softmax": not spec.norm_topk_prob,
        }


def _megatron(matrix: str) -> tuple[str, str]:
    """Megatron's names of an expert's matrix: in local layers, and in Transformer Engine's grouped ones."""
    return f"mlp.experts.local_experts.{{expert}}.{matrix}.weight", f"mlp.experts.{matrix}.weight{{expert}}"


def _experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a mixture of experts, from the keys of transformers 5 (`num_local_experts`) or 4."""
    return {
        "num_experts": raw.get("num_experts") or raw.get("num_local_experts") or 0,
        "num_experts_per_token": raw.get("num_experts_per_tok") or 0,
        "moe_intermediate_size": raw.get("moe_intermediate_size") or 0,
        "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
    }
