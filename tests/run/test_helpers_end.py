"""Helper processes end with the trainer, even when that is killed."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ctpo_megatron.base.processes import wait_for
from tests.support import ranks
from tests.support.deadlines import scaled

REWARDS = Path(__file__).parents[1] / "rewards"


def collector(_folder: Path) -> list[int]:
    """The process that collects what checkpoint writers report."""
    from ctpo_megatron.policy import checkpoint

    checkpoint.start_results_queue()
    return [child.pid for child in multiprocessing.active_children() if child.pid and "SyncManager" in child.name]


def writers(folder: Path) -> list[int]:
    """A process that writes a checkpoint, and those that it forks, one for each file."""
    from ctpo_megatron.policy import megatron_versions

    context = multiprocessing.get_context("fork")
    first = context.Process(target=megatron_versions._write_and_end_with, args=(os.getpid(), hang_twice, folder))
    first.start()
    assert first.pid is not None
    return [first.pid, *said(folder / "second")]


def hang_twice(folder: Path) -> None:
    if os.fork() == 0:
        say(folder / "second", [os.getpid()])
    time.sleep(600)


def scorers(folder: Path) -> list[int]:
    """The fork server, and a worker in the middle of a reward function that never returns."""
    from ctpo_megatron.config.schema import RewardConfig
    from ctpo_megatron.rewards import RewardPool
    from tests.rewards.test_rewards_pool import group

    config = RewardConfig(function={"name": "misbehaving_reward:misbehaving"}, timeout_s=600)
    pool = RewardPool(config, [str(REWARDS)], folder / "log")
    threading.Thread(target=lambda: asyncio.run(pool.score([group("hang in C")])), daemon=True).start()
    time.sleep(1)
    below = psutil.Process().children(recursive=True)
    return [process.pid for process in below if "resource_tracker" not in " ".join(process.cmdline())]


def said(file: Path) -> list[int]:
    deadline = time.monotonic() + scaled(60)
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} was not written"
        time.sleep(0.05)
    return [int(number) for number in json.loads(file.read_text())]


def say(file: Path, numbers: list[int]) -> None:
    file.with_suffix(".part").write_text(json.dumps(numbers))
    file.with_suffix(".part").replace(file)


def killed_trainer(start: Callable[[Path], list[int]], folder: Path) -> int:
    """A process with a group of its own starts helpers, says which, and is killed alone."""
    if (trainer := os.fork()) == 0:
        os.setsid()
        say(folder / "helpers", start(folder))
        signal.pause()
    said(folder / "helpers")
    time.sleep(0.5)  # a worker gets to its trajectory
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    return 0


@pytest.mark.parametrize("start", [collector, writers, scorers])
def test_helpers_end_with_a_killed_trainer(start: Callable[[Path], list[int]], tmp_path: Path) -> None:
    try:
        done = ranks.prefork().run(killed_trainer, start, tmp_path, deadline_s=120)
        assert done.returncode == 0, done.stderr
        helpers = said(tmp_path / "helpers")
        assert len(helpers) == {collector: 1, writers: 2, scorers: 2}[start]
        running = []
        for helper in helpers:
            with suppress(psutil.NoSuchProcess):
                running.append(psutil.Process(helper))
        assert wait_for(running, scaled(5)) == []
    finally:
        if (tmp_path / "helpers").exists():
            for helper in said(tmp_path / "helpers"):
                with suppress(ProcessLookupError):
                    os.kill(helper, signal.SIGKILL)
