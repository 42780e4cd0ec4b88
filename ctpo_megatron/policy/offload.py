"""Device memory that the policy does not need while trajectories are sampled, given back and taken again."""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import device
from ctpo_megatron.policy.model import BuiltModel


class Offload:
    """`policy.offload`: optimizer state (and parameters) wait in host memory, gradient buffers are freed.

    Only what the distributed optimizer keeps apart from the parameters can move: master weights and moments of a
    bfloat16 model (megatron-core's `offload_to_cpu`, `offload_grad_buffers`). Both methods may be called at any time.
    """

    def __init__(self, config: PolicyConfig, model: BuiltModel) -> None:
        self._what = config.offload
        self._model = model
        self._away: MegatronOptimizer | None = None
        self._released = False

    def release(self, optimizer: MegatronOptimizer | None) -> None:
        """Give the memory back; an unfinished gather of parameters is waited for."""
        if self._what == "none" or self._released:
            return
        self._model.finish_param_gather()
        if optimizer is not None:
            optimizer.offload_to_cpu()
        for chunk in self._model.wrapped:
            chunk.offload_grad_buffers()
            if self._what == "all":
                for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                    if buffer.param_data_cpu is None:  # pinned at once, where megatron-core would copy twice
                        buffer.param_data_cpu = torch.empty_like(
                            buffer.param_data, device="cpu", pin_memory=device.CUDA
                        )
                    buffer.offload_to_cpu(move_params=True, move_grads=False)
        device.release_cached_memory()  # megatron-core does so before the parameters' storage is freed
        self._away, self._released = optimizer, True

    def reclaim(self) -> None:
        """Take the memory again, with everything in it but the gradients, which are zero."""
        if not self._released:
            return
        for chunk in self._model.wrapped:
            if self._what == "all":
                for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                    buffer.reload_from_cpu(move_params=True, move_grads=False)
            chunk.restore_grad_buffers()
        if self._away is not None:
            self._away.restore_from_cpu()
        self._away, self._released = None, False
