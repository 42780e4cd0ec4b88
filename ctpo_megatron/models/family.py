"""A model family. The base class is a Llama-like decoder; a family overrides what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ctpo_megatron.models import mapping
from ctpo_megatron.models.mapping import ParamMapping, Shape
from ctpo_megatron.models.rotary import read_rotary, rotary_options, rotary_refusals
from ctpo_megatron.models.spec import ModelSpec, Refusal, is_count, is_positive

_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
)
_OF_THE_ENGINE = {
    "ada_rms_norm_t_cond": False,
    "bias": False,
    "dual_chunk_attention_config": None,
    "is_causal": True,
    "llama_4_scaling": None,
    "logit_scale": 1,
}
"""Keys of config.json that vLLM's classes of our families obey and the trainer does not, each with what changes
nothing."""


@dataclass(frozen=True)
class LayerSplit:
    """How the tensors of a layer are split over ranks. tensor: number of ranks; element: bytes of an activation."""

    tensor: int
    element: int
    sequence_parallel: bool


class ModelFamily:
    """A decoder with RMSNorm, rotary positions, grouped queries and a gated SiLU MLP, no biases: Llama's.

    A family overrides the attributes and methods that differ. All methods except `read` and `refusals` take the result
    of `read`. torch is imported only when tensors are processed.

    architecture: as in `architectures` of config.json. qkv_bias, qk_norm: of all its models. default_key_value_heads,
    default_head_dim: transformers' defaults; None: as many key-value heads as heads, and the hidden size divided by the
    heads. not_supported: keys of config.json that must be false or absent. embedding, final_norm, head, layer_prefix:
    Hugging Face names outside the layers, and the prefix of a layer's names.
    """

    architecture: str = ""
    qkv_bias: bool = False
    qk_norm: bool = False
    default_key_value_heads: int | None = None
    default_head_dim: int | None = None
    not_supported: tuple[str, ...] = ("mlp_bias", "attention_bias")
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer_prefix: str = "model.layers.{layer}."

    def refusals(self, raw: Mapping[str, Any]) -> Iterator[Refusal]:
        """Yield everything in a config.json that is not supported, or that trainer and engine would compute
        differently.
        """
        yield from (Refusal(f"has no positive integer {name!r}") for name in _COUNTS if not is_count(raw.get(name)))
        yield from self._head_refusals(raw)
        yield from rotary_refusals(raw)
        if not is_positive(raw.get("rms_norm_eps", 1e-6)):
            yield Refusal(f"rms_norm_eps {raw['rms_norm_eps']!r} is no positive number")
        if raw.get("hidden_act", "silu") != "silu":
            yield Refusal(f"activation {raw['hidden_act']!r} is not supported", "supported: silu")
        yield from (Refusal(f"{name} is not supported") for name in self.not_supported if raw.get(name))
        without = _OF_THE_ENGINE | {"qkv_bias": self.qkv_bias, "qk_norm": self.qk_norm}
        for name in sorted(without.keys() & raw.keys()):
            if raw[name] is not None and raw[name] != without[name]:
                message = f"{name} {raw[name]!r} is not supported: vLLM obeys it, and the trainer does not"
                yield Refusal(message, "take a model without it; where it only extends the context, remove it")
        if self.slides(raw):
            fix = (
                "the trainer would attend to everything. Where rollout.engine.max_model_len is within the window, both "
                "are the same: set sliding_window null and use_sliding_window false, and remove layer_types"
            )
            yield Refusal("sliding-window attention is not supported", fix)
        if raw.get("quantization_config"):
            yield Refusal("quantized weights cannot be trained", "use the unquantized model")

    def slides(self, raw: Mapping[str, Any]) -> bool:
        """Return whether a layer uses sliding-window attention."""
        layers = raw.get("layer_types")
        return bool(raw.get("use_sliding_window")) or (isinstance(layers, list) and "sliding_attention" in layers)

    def _head_refusals(self, raw: Mapping[str, Any]) -> Iterator[Refusal]:
        heads, groups = raw.get("num_attention_heads"), raw.get("num_key_value_heads", self.default_key_value_heads)
        wrong = [
            Refusal(f"{name} {value!r} is no positive integer", "leave it out for transformers' default")
            for name, value in (("num_key_value_heads", groups), ("head_dim", raw.get("head_dim")))
            if value is not None and not is_count(value)
        ]
        yield from wrong
        if not wrong and groups and is_count(heads) and heads % groups:
            yield Refusal(f"num_key_value_heads {groups} does not divide num_attention_heads {heads}")

    def read(self, raw: Mapping[str, Any]) -> ModelSpec:
        """Return the spec of a model from a config.json without refusals."""
        heads, rope = raw["num_attention_heads"], read_rotary(raw)
        return ModelSpec(
            family=self,
            num_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads", self.default_key_value_heads) or heads,
            head_dim=raw.get("head_dim") or self.default_head_dim or raw["hidden_size"] // heads,
            intermediate_size=raw["intermediate_size"],
            max_position_embeddings=raw["max_position_embeddings"],
            vocab_size=raw["vocab_size"],
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.pop("rope_theta")),
            rope_scaling=rope if rope["rope_type"] != "default" else None,
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )

    def ends(self, spec: ModelSpec) -> Iterator[ParamMapping]:
        """Parameters outside the layers; tied embeddings once."""
        vocabulary = (spec.vocab_size, spec.hidden_size)
        yield mapping.vocabulary("embedding.word_embeddings.weight", self.embedding, vocabulary)
        yield mapping.replicated(("decoder.final_layernorm.weight",), self.final_norm, (spec.hidden_size,))
        if not spec.tie_word_embeddings:
            yield mapping.vocabulary("output_layer.weight", self.head, vocabulary)

    def attention(self, spec: ModelSpec) -> Iterator[ParamMapping]:
        """Parameters of attention and the norm before it; names begin after `decoder.layers.N.` and `layer_prefix`."""
        h, d, name = spec.hidden_size, spec.head_dim, "self_attention.linear_qkv"
        queries, keys = spec.num_attention_heads * d, spec.num_key_value_heads * d
        # Transformer Engine fuses the norm with the projection.
        norms = ("input_layernorm.weight", f"{name}.layer_norm_weight")
        yield mapping.replicated(norms, "input_layernorm.weight", (h,))
        projections = [f"self_attn.{x}_proj" for x in "qkv"]
        shapes = ((queries, h), (keys, h), (keys, h))
        yield mapping.query_key_value(f"{name}.weight", [f"{p}.weight" for p in projections], shapes)
        if spec.qkv_bias:
            biases = [shape[:1] for shape in shapes]
            yield mapping.query_key_value(f"{name}.bias", [f"{p}.bias" for p in projections], biases)
        if spec.qk_norm:
            yield mapping.replicated(("self_attention.q_layernorm.weight",), "self_attn.q_norm.weight", (d,))
            yield mapping.replicated(("self_attention.k_layernorm.weight",), "self_attn.k_norm.weight", (d,))
        yield mapping.row_parallel(("self_attention.linear_proj.weight",), "self_attn.o_proj.weight", (h, queries))

    def mlp(self, spec: ModelSpec) -> Iterator[ParamMapping]:
        """Parameters of the MLP and the norm before it."""
        h, width = spec.hidden_size, spec.intermediate_size
        norms = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        yield mapping.replicated(norms, "post_attention_layernorm.weight", (h,))
        names = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
        yield mapping.gate_and_up(("mlp.linear_fc1.weight",), names, ((width, h), (width, h)))
        yield mapping.row_parallel(("mlp.linear_fc2.weight",), "mlp.down_proj.weight", (h, width))

    def layer(self, spec: ModelSpec) -> Iterator[ParamMapping]:
        """Yield all parameters of one layer."""
        yield from self.attention(spec)
        yield from self.mlp(spec)

    def tensors(self, spec: ModelSpec) -> dict[str, Shape]:
        """Name and shape of every tensor of a saved model; if tied, without the output layer."""
        found: dict[str, Shape] = {}
        for row in self.ends(spec):
            found |= dict(zip(row.hf, row.shapes, strict=True))
        in_layer: dict[str, Shape] = {}
        for row in self.layer(spec):
            for expert in range(spec.num_experts if row.per_expert else 1):
                in_layer |= {name.format(expert=expert): s for name, s in zip(row.hf, row.shapes, strict=True)}
        for layer in range(spec.num_layers):
            prefix = self.layer_prefix.format(layer=layer)
            found |= {prefix + name: shape for name, shape in in_layer.items()}
        return found

    def layer_parameters(self, spec: ModelSpec, tensor: int = 1, expert: int = 1) -> tuple[int, int]:
        """Parameters of one layer on one rank: outside experts, in experts."""
        dense = experts = 0
        for row in self.layer(spec):
            here = row.elements if row.dim is None else row.elements // tensor
            if row.per_expert:
                experts += spec.num_experts // expert * here
            else:
                dense += here
        return dense, experts

    def layer_flops(self, spec: ModelSpec) -> tuple[int, int]:
        """FLOPs of the matrix products of one layer, forward: of a token, and of a pair in attention.

        See `ForwardFlops`.
        """
        active = sum(
            row.elements * (spec.num_experts_per_token if row.per_expert else 1)
            for row in self.layer(spec)
            if row.is_matrix
        )
        return 2 * active, 4 * spec.num_attention_heads * spec.head_dim

    def layer_activations(self, spec: ModelSpec, split: LayerSplit) -> dict[str, int]:
        """Bytes that one layer keeps for backward, per token of a micro-batch of one rank, by `recompute` module.

        input: the residual stream at the layer's input.
        """
        p, t = split.element, split.tensor
        whole = spec.hidden_size * p // (t if split.sequence_parallel else 1)  # a tensor of the residual's shape
        heads, groups, d = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        q_k_v = (heads + 2 * groups) * d * p // t
        normed_q_k = (heads + groups) * d * p // t if spec.qk_norm else 0
        return {
            "input": whole,
            # Outputs of the norms. Only the output of the experts' norm can be recomputed: the other norm is fused with
            # a projection.
            "layernorm": whole,
            "fused norm": whole,
            "residual": whole,  # the input of the second norm
            "attention": q_k_v + normed_q_k + heads * d * p // t + 4 * heads // t,  # + log-sum-exp of flash attention
            **self.mlp_activations(spec, split),
        }

    def mlp_activations(self, spec: ModelSpec, split: LayerSplit) -> dict[str, int]:
        """Return the MLP's part of `layer_activations`."""
        return {"mlp": 3 * spec.intermediate_size * split.element // split.tensor}

    def transformer_options(self, spec: ModelSpec) -> dict[str, Any]:
        """Keyword arguments of Megatron's TransformerConfig in which families differ."""
        return {"qk_layernorm": spec.qk_norm, "add_qkv_bias": spec.qkv_bias}

    def gpt_options(self, spec: ModelSpec) -> dict[str, Any]:
        """Keyword arguments of Megatron's GPTModel in which families differ."""
        return rotary_options(spec)
