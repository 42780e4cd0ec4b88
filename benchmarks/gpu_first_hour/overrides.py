"""Overrides of a configuration that fit one GPU and this vLLM. Imports nothing that a bare machine lacks."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def on_device(device: str) -> list[str]:
    """For the quickstart on one GPU, whose engine sleeps while the trainer works; nothing for a CPU."""
    if device == "cpu":
        return []
    settings = ["rollout.engine.dtype=bfloat16", "rollout.engine.kv_cache_mb=null", "placement.mode=colocated"]
    return [*settings, "rollout.engine.gpu_memory_utilization=0.3", *attention()]


def attention() -> list[str]:
    """Attention by Triton, where this vLLM comes without the libraries of flash attention."""
    vllm = importlib.util.find_spec("vllm")
    folders = (vllm.submodule_search_locations or ()) if vllm else ()
    if any(list(Path(folder).glob("vllm_flash_attn/_vllm_fa[23]_C*.so")) for folder in folders):
        return []
    return ["rollout.engine.extra={attention_config: {backend: TRITON_ATTN}}"]
