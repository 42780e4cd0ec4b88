"""Process groups: torch.distributed and megatron's parallel state, for one process or many under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import device

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
"""How long ranks wait for what rank 0 does alone: sampling a batch, evaluating. Each of these has deadlines of its own
(`rollout.group_timeout_s`, ...), and together they take longer than any exchange of tensors may. A rank 0 that dies
closes its connections, which ends the wait at once."""


class RankZeroError(RuntimeError):
    """Rank 0 failed and says why itself; this rank stops with it. The message is one line."""


@dataclass(frozen=True)
class Layout:
    """Where this process stands in the parallel layout."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    ep_rank: int
    ep_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    waiting: dist.ProcessGroup | None = field(default=None, repr=False)
    """All ranks, with patience for rank 0 (`first`); None where there is only one."""

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def has_loss(self) -> bool:
        """Whether this rank's loss statistics count: one rank for each share of the loss."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def reports(self) -> bool:
        """One rank of each data-parallel replica, which knows the log-probs of all its tokens."""
        return self.has_loss and self.cp_rank == 0

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only; every rank returns its (pickled) result.

        When it raises, so does rank 0; the others raise RankZeroError. They wait up to a week: deadlines are those
        of the action.
        """
        if self.world_size == 1:
            return action()
        result, problem = None, None
        if self.rank == 0:
            try:
                result = action()
            except Exception as error:
                broadcast_object((None, f"{type(error).__name__}: {error}"), group=self.waiting)
                raise
        result, problem = broadcast_object((result, problem), group=self.waiting)
        if problem is not None:
            raise RankZeroError(f"rank {self.rank} stops, rank 0 failed: {problem.splitlines()[0]}")
        return result


def init_distributed(config: PolicyConfig, seed: int) -> Layout:
    """Join the job that torchrun describes in the environment (alone without it) and cut it into parallel groups.

    Every collective has the deadline `policy.timeout_minutes`, what waits for rank 0 alone a longer one. Raises
    RuntimeError when a rank does not arrive.
    """
    device.install()
    torch.set_num_threads(config.threads)
    here = device.local_device(int(os.environ.get("LOCAL_RANK", 0)))
    timeout = timedelta(minutes=config.timeout_minutes)
    backend = "cpu:gloo,cuda:nccl" if device.CUDA else device.BACKEND
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    with device.scope():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            distributed_timeout_minutes=config.timeout_minutes,
        )
        model_parallel_cuda_manual_seed(seed)
    several = dist.get_world_size() > 1
    return Layout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        ep_size=mpu.get_expert_model_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        device=here,
        waiting=dist.new_group(backend="gloo", timeout=_PATIENCE) if several else None,
    )


def broadcast_object(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Every rank returns rank `source`'s value (pickled; deadline of `group`, by default that of all collectives)."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group, device=torch.device("cpu"))
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank returns the list of all ranks' values, in rank order."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def destroy_distributed() -> None:
    """Leave the groups; safe to call when nothing was initialized."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
