"""Whether trainer ranks on this machine run on CUDA; `preflight.has_cuda_device` does so without importing torch."""

from __future__ import annotations

from ctpo_megatron.base.installed import is_installed


def torch_has_cuda() -> bool:
    """Whether torch has CUDA; imports torch (2 CPU-seconds). False without torch."""
    if not is_installed("torch"):
        return False
    import torch

    return torch.cuda.is_available()


def visible_gpus() -> int:
    """GPUs that torch shows on this node; 0 without torch."""
    if not is_installed("torch"):
        return 0
    import torch

    return torch.cuda.device_count()
