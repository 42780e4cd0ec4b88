"""The trainer's device memory: acquired before work, offloaded while engines sample on the same GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.optimizer import MegatronOptimizer

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import device
from ctpo_megatron.policy.host_copy import HostCopy
from ctpo_megatron.policy.model import BuiltModel


class DeviceMemory:
    """`policy.offload`: optimizer state (and parameters) move to host memory, gradient buffers are freed.

    Only state that the distributed optimizer holds separately from the parameters can move: master weights and moments
    of a 16-bit model. Methods may be called at any time. The optimizer's own `offload_to_cpu` takes new pageable memory
    each time, at 2 GB/s on an H200 (benchmarks/results/gpu/nvidia-h200.md).
    """

    def __init__(self, config: PolicyConfig, model: BuiltModel) -> None:
        self._what = config.offload
        self._model = model
        self._state = HostCopy()
        self._released = False

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which everything is on the device, for passes of the model. Does not nest."""
        with device.scope():
            self._reclaim()
        yield

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """As `on_device`, and all of megatron-core can be called."""
        with self.on_device(), device.scope():
            yield

    @contextmanager
    def weights_complete(self) -> Iterator[None]:
        """As `in_use`, with every parameter complete for readers on any stream.

        Only the current stream waits for the gather of `overlap_param_gather`, and vLLM's NCCL producer reads on
        streams of its own. The same holds for the copies of a reclaim.
        """
        with self.in_use():
            self._model.finish_param_gather()
            device.synchronize()
            yield

    def release(self, optimizer: MegatronOptimizer | None) -> None:
        """Release the memory, after any unfinished gather of parameters. optimizer: the current one, if any."""
        if self._what == "none" or self._released:
            return
        with device.scope():
            self._model.finish_param_gather()
            if optimizer is not None:
                self._state.take(_tensors(optimizer))
            for chunk in self._model.wrapped:
                chunk.offload_grad_buffers()
                if self._what == "all":
                    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                        if buffer.param_data_cpu is None:  # pinned directly; megatron-core would copy twice
                            buffer.param_data_cpu = torch.empty_like(
                                buffer.param_data, device="cpu", pin_memory=device.CUDA
                            )
                        buffer.offload_to_cpu(move_params=True, move_grads=False)
            device.release_cached_memory()  # megatron-core does this before it frees the parameters' storage
        self._released = True

    def _reclaim(self) -> None:
        """Move everything back to the device. Gradients are zero."""
        if not self._released:
            return
        for chunk in self._model.wrapped:
            if self._what == "all":
                for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                    buffer.reload_from_cpu(move_params=True, move_grads=False)
            chunk.restore_grad_buffers()
        self._state.restore()
        self._released = False


def _tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Master weights and moments on the device."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if (inner := each.optimizer) is None or each.is_stub_optimizer:  # a rank without parameters of this kind
            continue
        for group in inner.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.is_cuda)
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.is_cuda)
