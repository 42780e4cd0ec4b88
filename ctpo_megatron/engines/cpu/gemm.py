"""Matrices of an engine on a CPU: products padded to few numbers of tokens, and layouts made again after an update.

oneDNN compiles a kernel for each number of tokens in a step, and a layer discards its kernels with every weight update.
A batch that shrinks as its sequences end has nearly every number. Compiling took 0.4 to 1 ms (AMD EPYC), multiplying
256 tokens with a matrix of the quickstart 0.1 to 0.2 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

_SMALL_MATRIX = 1 << 18
"""Elements of a matrix that multiplies 256 tokens about as fast as oneDNN compiles; larger ones are not padded."""
_LEAST, _PER_DOUBLING = 8, 4


def padded_tokens(tokens: int) -> int:
    """Return the number of tokens to multiply: a multiple of 8, and one of four in each doubling."""
    step = max(_LEAST, (1 << (tokens - 1).bit_length()) // (2 * _PER_DOUBLING))
    return tokens + -tokens % step


def pad_small_products() -> None:
    """Patch vLLM in this process: layers with small matrices multiply `padded_tokens` tokens.

    The results have the same bits: oneDNN computes each row independently of the others.
    """
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm

    def choose_product(layer: Any, remove_weight: bool) -> None:
        numbers = layer.weight.numel()
        original(layer, remove_weight)
        if hasattr(layer, "cpu_linear") and numbers <= _SMALL_MATRIX:
            layer.cpu_linear = _Padded(layer.cpu_linear)

    utils.dispatch_cpu_unquantized_gemm = choose_product


def pack_again(model: torch.nn.Module) -> None:
    """Pack what vLLM 0.32 packs only when a model is first loaded; called after every weight update."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        # A head tied to the embedding receives no weights of its own, so vLLM does not process it again, and it would
        # continue with the packed copy of the previous weights.
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        # Experts are not packed again either: the kernels would read the new weights as if they were packed.
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


class _Padded:
    """A layer's product `[tokens, in] -> [tokens, out]`, with rows of zeros appended to the tokens."""

    def __init__(self, product: _Product) -> None:
        self.product = product

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tokens = x.shape[0]
        more = padded_tokens(tokens) - tokens
        if not more:
            return self.product(x, weight, bias)
        return self.product(F.pad(x, (0, 0, 0, more)), weight, bias)[:tokens]
