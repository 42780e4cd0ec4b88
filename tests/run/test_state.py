"""Where a run stands: the numbers of its steps, what is due after each, and how a preemption ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_megatron.base.signals import ENDING
from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import destroy_distributed, init_distributed
from ctpo_megatron.run import Preemption, RunState
from tests.tracking.synthetic_run import make_config


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunState]:
    before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGALRM)}
    init_distributed(PolicyConfig(), seed=0)
    settings = {
        "run": {"name": "demo", "root": str(tmp_path), "steps": 5},
        "eval": {"every": 2},
        "checkpoint": {"every": 3},
    }
    yield RunState(make_config(tmp_path, **settings), Preemption(grace_s=60))
    destroy_distributed()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_steps_go_on_after_those_that_are_done(run: RunState) -> None:
    run.done, run.version = 2, 3
    seen = []
    for step in run.steps():
        seen.append((step, run.advance(), run.evaluates, run.saves))
    assert seen == [(3, 4, False, True), (4, 5, True, False), (5, 6, True, False)]  # the last is evaluated, too


def test_the_state_before_the_first_step_is_evaluated(run: RunState) -> None:
    assert (run.done, run.version, run.evaluates) == (0, 1, True)


def test_the_first_evaluation_can_be_left_out_but_not_that_of_a_run_without_steps(run: RunState) -> None:
    quiet = run.config.eval.model_copy(update={"before_training": False})
    run.config = run.config.model_copy(update={"eval": quiet})
    assert not run.evaluates
    run.config = run.config.model_copy(update={"run": run.config.run.model_copy(update={"steps": 0})})
    assert run.evaluates


def test_an_evaluation_is_waited_for_where_something_needs_its_result(run: RunState) -> None:
    def awaited(**checkpoint: object) -> list[int]:
        kept = run.config.checkpoint.model_copy(update=checkpoint)
        run.config = run.config.model_copy(update={"checkpoint": kept})
        steps = []
        for run.done in range(6):
            steps += [run.done] if run.awaits_evaluation else []
        return steps

    assert awaited(keep_best=0, best_metric="val/x/acc/mean@1") == [5]  # the last checkpoint, the report, the export
    assert awaited(keep_best=2, best_metric="reward/mean") == [5]
    assert awaited(keep_best=2, best_metric="val/x/acc/mean@1") == [0, 3, 5]


def test_a_stopped_run_yields_no_further_step(run: RunState) -> None:
    seen = []
    for step in run.steps():
        seen.append(step)
        run.stop()
    assert seen == [1] and run.preempted and run.done == 0


def test_sigterm_is_noticed_and_ends_the_loop_after_the_step(run: RunState) -> None:
    with run.preemption.deferred():
        assert not run.notice()
        for step in run.steps():
            run.advance()
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            run.notice()
    assert run.done == 2 and run.preempted
