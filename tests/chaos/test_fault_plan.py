"""What a long life plans and measures, on numbers that are known."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from ctpo_megatron.data import Prompt, PromptSampler
from tests.chaos import kills
from tests.chaos.accounts import consumed
from tests.chaos.faults import EARLY, ENDING, KINDS, Faults, plan
from tests.chaos.memory import fitted, private_mb
from tests.support import children


def test_a_plan_has_as_many_faults_as_asked_for_and_every_kind() -> None:
    planned = plan(seed=44, steps=600, count=60)
    assert len(planned) == 60 and plan(seed=44, steps=600, count=60) == planned
    counts = Counter(fault.kind for fault in planned)
    assert set(counts) == {*KINDS, *ENDING} and min(counts.values()) >= 3
    assert [fault.step for fault in planned] == sorted(fault.step for fault in planned)
    assert all(2 <= fault.step <= 596 for fault in planned)
    assert max(fault.step for fault in planned if fault.kind in ENDING) <= EARLY * 600


def test_a_process_that_ends_before_it_is_killed_is_no_fault_and_another_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, lives = (subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2))
    found = [psutil.Process(gone.pid), psutil.Process(lives.pid)]
    gone.kill()
    gone.wait()
    monkeypatch.setattr(kills, "of_kind", lambda _run, _kind: [found.pop(0)])
    assert Faults(0, tmp_path, tmp_path / "clock").do("kill engine", 1) == f"process {lives.pid}"
    assert lives.wait() == -signal.SIGKILL


def test_kinds_can_be_left_out_by_their_names() -> None:
    planned = plan(seed=1, steps=60, count=8, without=["kill gcs", "fill disk"])
    assert len(planned) == 8 and not {"kill gcs", "fill disk"} & {fault.kind for fault in planned}
    with pytest.raises(ValueError, match=r"no faults: kill all; there are kill engine, "):
        plan(seed=1, steps=60, count=8, without=["kill all"])


@pytest.mark.parametrize("without", [(), ENDING, ("kill gcs", "freeze raylet")])
def test_nothing_happens_to_a_raylet_that_was_killed_until_the_next_start(without: tuple[str, ...]) -> None:
    for seed in range(100):
        planned = plan(seed, steps=600, count=60, without=without)
        assert len(planned) == 60 and all(2 <= fault.step <= 596 for fault in planned)
        killed, kills = False, 0
        for fault in planned:
            assert not (killed and "raylet" in fault.kind), seed
            killed = (killed and fault.kind not in ENDING) or fault.kind == "kill raylet"
            kills += fault.kind == "kill raylet"
        assert kills >= (1 if without == ENDING else 3)


def test_memory_that_a_forked_child_shares_is_still_private() -> None:
    code = "import os, sys\nx = b'x' * 100_000_000\nfor _ in sys.stdin: print(os.fork() and 'forked', flush=True)"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, start_new_session=True, **streams) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            seen = psutil.Process(process.pid)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline()
            assert private_mb(seen) > 100 > seen.memory_full_info().uss / 1e6
        finally:
            children.end(process)


def test_prompts_of_all_epochs_are_counted() -> None:
    prompts = [Prompt(name, "", (), "", (1,)) for name in "abcd"]
    sampler = PromptSampler(prompts, seed=0)
    taken = [prompt.id for prompt in sampler.take(10)]
    assert Counter(consumed(sampler.state_dict(), "abcd")) == Counter(taken)
    with pytest.raises(AssertionError, match="epoch 2: which prompts"):
        consumed(sampler.state_dict(), [])


@pytest.mark.parametrize(
    ("at_start", "per_s", "too_much"),
    [(200.0, 0.0, False), (200.0, 0.05, False), (200.0, 0.1, True), (4000.0, 0.1, False), (4000.0, 0.5, True)],
)
def test_growth_is_seen_beneath_what_comes_and_goes(at_start: float, per_s: float, too_much: bool) -> None:
    """The limits are 20 MB, and 2 % of 4000 MB, in the 300 s between the middles of the thirds."""
    at = np.arange(0.0, 900.0, 2.0)
    mb = at_start + per_s * at + 15 * np.sin(at) + np.where(at < 250, -100.0, 0.0)  # a start is no growth
    growth = fitted("trainer", list(zip(at, mb, strict=True)))
    assert growth.too_much is too_much
    assert growth.after - growth.before == pytest.approx(300 * per_s, abs=3)
