"""Matrices that vLLM packs for CPU kernels when a model is first loaded: packed again after a weight update."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def pack_again(model: torch.nn.Module) -> None:
    """Pack what vLLM 0.32 packs only when a model is first loaded; called after every weight update."""
    for module in model.modules():
        # A head tied to the embedding receives no weights of its own, so vLLM does not process it again, and it would
        # continue with the packed copy of the previous weights.
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        # Experts are not packed again either: the kernels would read the new weights as if they were packed.
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
