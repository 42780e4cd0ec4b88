"""What a family reads from config.json: the shape of a model, or why it is not supported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ctpo_megatron.models.family import ModelFamily


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of the matrix products of a forward pass; the backward pass needs twice that.

    token: of projections and MLPs for each token. pair: of attention for each pair of a query and a key that it sees.
    prediction: of the output layer for each response token. Model FLOPs in the sense of MFU (Chowdhery et al.,
    arXiv 2204.02311, appendix B). They exclude recomputation, padding, and everything but matrix products (norms,
    softmax, rotary embedding, optimizer). With L layers, width H, h heads and g key-value heads of width d, MLP width
    I and vocabulary V:

        token        L (2 H (h + 2 g) d + 2 h d H + 6 H I)
        pair         L 4 h d                                  two products of width d
        prediction   2 H V

    In a mixture of experts 6 H I becomes 6 H I_e k + 2 H E: k active experts of width I_e, and the router over E.
    """

    token: int
    pair: int
    prediction: int

    def __call__(self, tokens: int, predicted: int) -> float:
        """Of a sequence of `tokens` with `predicted` response tokens."""
        return float(tokens * self.token + self.attention(tokens) + predicted * self.prediction)

    def attention(self, tokens: int) -> int:
        """Of causal attention over a sequence: T (T + 1) / 2 pairs."""
        return tokens * (tokens + 1) // 2 * self.pair


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder model.

    vocab_size: rows of the embedding.
    rope_scaling: None, or `rope_type` ("linear" or "llama3") with its parameters, e.g. `factor`.
    num_experts: per layer, 0 for a dense model; `num_experts_per_token` are active, each of width
    `moe_intermediate_size`. norm_topk_prob: the weights of the active experts are normalized to sum to 1.
    """

    family: ModelFamily
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

    @property
    def unseen(self) -> dict[str, Any]:
        """Properties that change the computation but not the shapes of the weights, by their names in config.json."""
        return {
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "num_experts_per_tok": self.num_experts_per_token,
            "norm_topk_prob": self.norm_topk_prob,
        }

    @property
    def forward_flops(self) -> ForwardFlops:
        """FLOPs of a forward pass as a function of its tokens."""
        token, pair = self.family.layer_flops(self)
        prediction = 2 * self.hidden_size * self.vocab_size
        return ForwardFlops(self.num_layers * token, self.num_layers * pair, prediction)


class Refusal(NamedTuple):
    """What is not supported in a config.json, and what is."""

    message: str
    fix: str = ""


def is_positive(value: Any) -> bool:
    """Return whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def is_count(value: Any) -> bool:
    """Return whether it is an integer above 0."""
    return isinstance(value, int) and is_positive(value)
