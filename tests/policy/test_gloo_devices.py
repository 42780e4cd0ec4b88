"""gloo's groups share their devices: one thread watches the network, however many groups there are."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.gloo import share_devices
from ctpo_megatron.policy import init_distributed
from tests.support.ranks import RanksFailed, run
from tests.support.threads import threads_named

WATCHER = "gloo_tcp_loop"


def watchers() -> int:
    return threads_named(os.getpid(), WATCHER)


def sums_of_a_trainer() -> tuple[list[float], int]:
    """Of the group of all ranks and of six more, beside those that megatron makes."""
    layout = init_distributed(PolicyConfig(tensor_model_parallel_size=2), seed=0)
    found = []
    for group in [None, *(dist.new_group([0, 1]) for _ in range(6))]:
        value = torch.tensor([1.0 + layout.rank])
        dist.all_reduce(value, group=group)
        found.append(value.item())
    return found, watchers()


def groups() -> tuple[float, int]:
    """What five groups say, and how many watchers there are then."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    value = torch.ones(1)
    for group in [dist.new_group([0]) for _ in range(4)]:
        dist.all_reduce(value, group=group)
    dist.destroy_process_group()
    return value.item(), watchers()


def here_and_in_a_child(interfaces: str) -> list[tuple[float, int]]:
    """`groups` of a process, then of one that it forks."""
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    share_devices()
    here = groups()
    with ProcessPoolExecutor(1, get_context("fork")) as child:
        return [here, child.submit(groups).result(60)]


def test_ranks_of_a_trainer_have_one_network_thread() -> None:
    for sums, found in run(sums_of_a_trainer, ranks=2):
        assert found == 1
        assert sums == [3.0] * 7


def test_a_forked_process_has_a_device_of_its_own() -> None:
    assert run(here_and_in_a_child, "") == [[(1.0, 1), (1.0, 1)]]


def test_interfaces_are_those_of_the_environment() -> None:
    assert run(here_and_in_a_child, "lo,lo") == [[(1.0, 2), (1.0, 2)]]
    with pytest.raises(RanksFailed, match="no-such-interface"):
        run(here_and_in_a_child, "no-such-interface")


def test_the_deadline_of_a_group_is_kept() -> None:
    with pytest.raises(RanksFailed, match=r"(?i)timed? ?out"):
        run(wait_for_nobody, ranks=2)


def wait_for_nobody() -> None:
    share_devices()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
