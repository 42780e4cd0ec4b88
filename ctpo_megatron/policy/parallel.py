"""Process groups: torch.distributed and megatron's parallel state, for one process or many under torchrun."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import HashStore

from ctpo_megatron.config import PolicyConfig, available_cores, node_ranks
from ctpo_megatron.policy import device
from ctpo_megatron.policy.rank_zero import RankZero

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """The position of this process in the parallel layout."""

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
    dp_ranks: tuple[int, ...] = (0,)
    """Data-parallel rank of every rank of the job."""
    rank_zero: RankZero | None = field(default=None, repr=False)
    """None where there is only one rank."""

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def has_loss(self) -> bool:
        """Whether this rank's loss statistics count: one rank for each share of the loss."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def reports(self) -> bool:
        """Whether this rank reports for its data-parallel replica: it knows the log-probs of all its tokens."""
        return self.has_loss and self.cp_rank == 0

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank zero only; every rank returns its (pickled) result. See `RankZero.run`."""
        return action() if self.rank_zero is None else self.rank_zero.run(action)

    def keep_on_rank_zero(self, action: Callable[[], T]) -> T | None:
        """Run `action` on rank zero only and return its result there; the other ranks wait for it and return None."""
        kept: list[T] = []
        self.on_rank_zero(lambda: kept.append(action()))
        return kept[0] if kept else None

    def wait_for_ranks(self) -> None:
        """Return when every rank has called this; collective."""
        if self.rank_zero is not None:
            gather_objects(None)

    def gather(self, value: T) -> list[T]:
        """Every rank returns the list of all ranks' values, in rank order; collective."""
        return [value] if self.world_size == 1 else gather_objects(value)

    def lost_ranks_named(self) -> AbstractContextManager[None]:
        """Within, a collective that fails because a rank is lost raises RankLost; see `RankZero.lost_ranks_named`."""
        return nullcontext() if self.rank_zero is None else self.rank_zero.lost_ranks_named()


def usable_threads(wanted: int) -> int:
    """`wanted` threads, or fewer if this node has too few cores: ranks that share a core wait for each other."""
    cores, ranks = available_cores(), node_ranks() or 1
    taken = min(wanted, max(1, cores // ranks))
    if taken < wanted:
        log.info("policy.threads: %d of %d; this node has %d cores for %d ranks", taken, wanted, cores, ranks)
    return taken


def init_distributed(config: PolicyConfig, seed: int) -> Layout:
    """Join the job that torchrun describes in the environment (a single process without it) and create parallel groups.

    Every collective has the deadline `policy.timeout_minutes`; actions of rank zero alone have their own. Raises
    RuntimeError when a rank does not join.
    """
    device.install()
    torch.set_num_threads(usable_threads(config.threads))
    here = device.local_device(int(os.environ.get("LOCAL_RANK", 0)))
    timeout = timedelta(minutes=config.timeout_minutes)
    backend = "cpu:gloo,cuda:nccl" if device.CUDA else device.BACKEND
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
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
        dp_ranks=tuple(gather_objects(mpu.get_data_parallel_rank())),
        rank_zero=RankZero(timeout) if dist.get_world_size() > 1 else None,
    )


def gather_objects(value: Any) -> list[Any]:
    """Every rank returns the list of all ranks' values, in rank order."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_on_rank_zero(value: Any) -> list[Any] | None:
    """Rank zero returns the list of all ranks' values, in rank order; the others None."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def destroy_distributed() -> None:
    """Destroy the groups; safe to call when nothing was initialized."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
