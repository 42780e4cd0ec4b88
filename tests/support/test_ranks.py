"""Jobs of several ranks: what they leave behind, and what is said when one of them fails."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import children, ranks

pytestmark = pytest.mark.slow  # of the harness, which changes seldom


def environment_of_a_rank() -> tuple[str | None, str | None, int]:
    return os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), torch.get_num_threads()


def test_ranks_are_told_who_they_are() -> None:
    assert ranks.run(environment_of_a_rank) == [(None, None, 1)]
    assert ranks.run(environment_of_a_rank, ranks=2) == [("0", "2", 1), ("1", "2", 1)]


def leave_traces() -> bool:
    """Change what later calls in the same process would see."""
    from ctpo_megatron.policy import device

    device.install()
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    return True


def state() -> tuple[object, ...]:
    from ctpo_megatron.policy import replacements

    return (
        replacements._installed,
        dist.is_initialized(),
        torch.initial_seed(),
        torch.get_rng_state().sum().item(),
        torch.are_deterministic_algorithms_enabled(),
    )


def test_nothing_stays_for_the_next_job() -> None:
    before = ranks.run(state)
    assert ranks.run(leave_traces) == [True]
    assert ranks.run(state) == before


def fail_on(rank: str, how: str) -> None:
    print(f"rank {os.environ['RANK']} has begun", flush=True)
    if os.environ["RANK"] == rank:
        if how == "raise":
            raise ValueError("what went wrong")
        os.kill(os.getpid(), 9)
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "fate"), [("raise", "rank 1 ended with status 1"), ("kill", "rank 1 was killed by signal 9")]
)
def test_a_rank_that_fails_is_named_with_everybodys_output(
    how: str, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_GRACE_S", 1.0)
    with pytest.raises(ranks.RanksFailed) as caught:
        ranks.run(fail_on, "1", how, ranks=2)
    said = str(caught.value)
    assert "fail_on failed on 2 ranks" in said and fate in said
    assert "rank 0 had not ended" in said and "rank 0 has begun" in said and "rank 1 has begun" in said
    assert ("ValueError: what went wrong" in said) == (how == "raise")


def start_another() -> int:
    """A process that would outlive its parent."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def hang_with_another() -> None:
    print(start_another(), flush=True)
    time.sleep(600)


def test_what_a_rank_started_ends_with_it() -> None:
    (pid,) = ranks.run(start_another)
    assert children.has_ended(pid)


def test_a_job_that_takes_too_long_ends_with_all_it_started() -> None:
    with pytest.raises(ranks.RanksFailed, match="had not ended") as caught:
        ranks.run(hang_with_another, deadline_s=2.0)
    assert children.has_ended(int(str(caught.value).splitlines()[-1]))


def test_ranks_find_what_the_tests_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have started before pytest put the folder of a test there."""
    ranks.prefork()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "found_later.py").write_text("def answer():\n    return 42\n")
    assert ranks.run(importlib.import_module("found_later").answer) == [42]
