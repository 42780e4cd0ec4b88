"""Process groups: torch.distributed and megatron's parallel state, and how rank zero commands the other ranks."""

from __future__ import annotations

import logging
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

log = logging.getLogger(__name__)
T = TypeVar("T")
_UNTIL_CALLED = timedelta(days=365)
"""For a rank that waits for rank zero: the one wait without a deadline of its own."""
_TRAVEL = timedelta(minutes=1)
"""For a result to reach all ranks, which are there by then."""
_AFTER_FAILURE = timedelta(seconds=20)
"""Ranks that live come within this time to hear of a failure, or to say that they are not the cause of one."""


class RankZeroError(RuntimeError):
    """Rank zero failed and reports the cause itself; this rank stops too. The message is one line.

    __cause__: what rank zero raised, if it can be sent.
    """


class RankLost(RuntimeError):
    """Another rank of the job died or hangs; the message names it."""


class RankZero:
    """What rank zero does for all; one per rank, which all ranks of the job create and call in the same order.

    Ranks meet in a barrier of gloo that knows who is missing, then the result is broadcast. A collective of the
    training cannot do this: its deadline is meant for an exchange of tensors, and sampling a batch takes longer. That a
    rank has died while rank zero acts is torchrun's to notice: it ends the job.
    """

    def __init__(self, timeout: timedelta) -> None:
        """timeout: how long rank zero waits for the other ranks when it has a result for them."""
        self.rank, self._size, self._timeout = dist.get_rank(), dist.get_world_size(), timeout
        # gloo's barrier takes a limit from rank zero only: the others wait as long as their group allows.
        self._waiting = dist.new_group(backend="gloo", timeout=_UNTIL_CALLED)
        self._results = dist.new_group(backend="gloo", timeout=_TRAVEL)
        self.names: list[str] = [""] * self._size
        dist.all_gather_object(self.names, f"rank {self.rank} (process {os.getpid()} on {socket.gethostname()})")

    def run(self, action: Callable[[], T]) -> T:
        """Run `action` on rank zero; every rank returns its result, which is pickled.

        There is no deadline except the action's own. When it raises, so does rank zero, and the others raise
        RankZeroError. Raises RankLost when a rank is gone or does not come in time.
        """
        if self.rank != 0:
            return self._receive()  # type: ignore[no-any-return] # what rank zero pickled
        try:
            result = action()
            content = pickle.dumps(("", result, None))
        except Exception as error:
            self._tell(error)
            raise
        self._send(content, self._timeout)
        return result

    @contextmanager
    def lost_ranks_named(self) -> Iterator[None]:
        """Within, a collective that fails because a rank is lost raises RankLost on rank zero; every rank enters it.

        The ranks that live meet once more after the failure: who does not come is lost. When all come, what failed is
        raised as it is.
        """
        try:
            yield
        except (RankZeroError, RankLost):
            raise
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "/gloo/" in str(error):
                self._meet(self._results, _AFTER_FAILURE)
            raise

    def _tell(self, error: Exception) -> None:
        """Have the other ranks raise RankZeroError; those that do not come soon learn it by losing rank zero."""
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            self._send(pickle.dumps((first, None, _portable(error))), _AFTER_FAILURE)
        except RankLost as lost:
            log.warning("the other ranks do not know of the failure: %s", lost)

    def _send(self, content: bytes, timeout: timedelta) -> None:
        self._meet(self._waiting, timeout)
        dist.broadcast_object_list([content], group=self._results, device=torch.device("cpu"))

    def _receive(self) -> Any:
        self._meet(self._waiting, _UNTIL_CALLED)
        box: list[Any] = [None]
        dist.broadcast_object_list(box, group=self._results, device=torch.device("cpu"))
        problem, result, cause = pickle.loads(box[0])
        if problem:
            raise RankZeroError(f"rank {self.rank} stops, rank 0 failed: {problem}") from cause
        return result

    def _meet(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        """Return when every rank has come. timeout: rank zero's; the others have the group's.

        Raises RankLost, which names all ranks that have not come on rank zero, and rank zero on the others.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            dist.monitored_barrier(group, timeout, wait_all_ranks=True)
        except RuntimeError as error:
            what = "gone; the cause is in the log of that rank"
            if time.monotonic() >= deadline:
                within = f"within {timeout.total_seconds():g} s"
                what = f"no answer to rank 0 {within}; it is frozen, hangs, or is cut off"
            raise RankLost(self._lost(group, str(error), what)) from error

    def _lost(self, group: dist.ProcessGroup, problem: str, what: str) -> str:
        if self.rank != 0:
            return f"rank {self.rank} stops: {self.names[0]} is gone, or has lost another rank"
        if listed := re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", problem):
            lost = [self.names[int(rank)] for rank in listed[1].split(",")]
        else:
            lost = [name for rank, name in enumerate(self.names) if rank and self._is_gone(group, rank)]
        return f"{', '.join(lost) or 'another rank'}: {what}"

    def _is_gone(self, group: dist.ProcessGroup, rank: int) -> bool:
        """Whether the connection to a rank is closed: gloo refuses at once to receive from it.

        The barrier itself does not say which rank was gone before it began. After a time-out gloo closes all.
        """
        try:
            dist.irecv(torch.zeros(1), rank, group)
        except RuntimeError:
            return True
        return False


def _portable(error: Exception) -> Exception | None:
    """The error, if another process can have it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        return None
    return error


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

    def wait_for_ranks(self) -> None:
        """Return when every rank has called this; collective."""
        if self.rank_zero is not None:
            gather_objects(None)

    def gather(self, value: T) -> list[T]:
        """Return the list of all ranks' values on every rank, in rank order; collective."""
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
    backend = "cpu:gloo,cuda:nccl" if device.CUDA else "gloo"
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
    """Return the list of all ranks' values on every rank, in rank order."""
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
