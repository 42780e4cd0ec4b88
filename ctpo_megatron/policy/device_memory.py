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
    each time, at 2 GB/s on an H200 (benchmarks/results/gpu/nvidia-h200.md). Parameter buffers pin theirs whole, which
    torch rounds up to a power of two.
    """

    def __init__(self, config: PolicyConfig, model: BuiltModel) -> None:
        self._what = config.offload
        self._model = model
        self._host = HostCopy()
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
            self._host.take([*self._parameters(), *(_tensors(optimizer) if optimizer is not None else ())])
            for chunk in self._model.wrapped:
                chunk.offload_grad_buffers()
            device.release_cached_memory()
        self._released = True

    def _reclaim(self) -> None:
        """Move everything back to the device. Gradients are zero."""
        if not self._released:
            return
        self._host.restore()
        for chunk in self._model.wrapped:
            chunk.restore_grad_buffers()
        self._released = False

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Buffers that the parameters are views of, as far as they move."""
        if self._what == "all":
            for chunk in self._model.wrapped:
                yield from (buffer.param_data for buffer in chunk.buffers + chunk.expert_parallel_buffers)


def _tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Master weights and moments on the device."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if (inner := each.optimizer) is None or each.is_stub_optimizer:  # a rank without parameters of this kind
            continue
        for group in inner.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.is_cuda)
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.is_cuda)
