"""gloo's groups share their devices: one thread watches the network, however many groups there are."""

from __future__ import annotations

import os

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
    """Of groups of every kind that megatron has made, and of one that is made and ended many times."""
    layout = init_distributed(PolicyConfig(tensor_model_parallel_size=2), seed=0)
    found = []
    for group in [None, *(dist.new_group([0, 1]) for _ in range(6))]:
        value = torch.tensor([1.0 + layout.rank])
        works = [dist.all_reduce(value, group=group, async_op=True)]
        for work in works:
            work.wait()
        found.append(value.item())
        if group is not None:
            dist.destroy_process_group(group)
    return found, watchers()


def in_a_child_of(interface: str | None) -> tuple[list[int], list[float]]:
    """Watchers of a process and of its child, and what groups of both say."""
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    share_devices()
    read, write = os.pipe()

    def groups() -> float:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        value = torch.ones(1)
        for group in [dist.new_group([0]) for _ in range(4)]:
            dist.all_reduce(value, group=group)
        dist.destroy_process_group()
        return value.item()

    here = groups()
    if os.fork() == 0:
        os.write(write, f"{groups()} {watchers()}".encode())
        os._exit(0)
    os.wait()
    there, of_child = os.read(read, 100).decode().split()
    return [watchers(), int(of_child)], [here, float(there)]


def test_ranks_of_a_trainer_have_one_network_thread() -> None:
    for sums, found in run(sums_of_a_trainer, ranks=2):
        assert found == 1
        assert sums == [3.0] * 7


def test_a_forked_process_has_a_device_of_its_own() -> None:
    [(found, sums)] = run(in_a_child_of, None)
    assert found == [1, 1]
    assert sums == [1.0, 1.0]


def test_interfaces_are_those_of_the_environment() -> None:
    [(found, _)] = run(in_a_child_of, "lo,lo")
    assert found == [2, 2]
    with pytest.raises(RanksFailed, match="no-such-interface"):
        run(in_a_child_of, "no-such-interface")


def test_the_deadline_of_a_group_is_kept() -> None:
    with pytest.raises(RanksFailed, match=r"(?i)timed? ?out"):
        run(wait_for_nobody, ranks=2)


def wait_for_nobody() -> None:
    from datetime import timedelta

    share_devices()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
