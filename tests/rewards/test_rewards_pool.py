"""Hangs, crashes and exceptions of a scorer cost one trajectory, are counted, and are logged by name."""

from __future__ import annotations

import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from misbehaving_scorer import misbehaving

from ctpo_megatron.config.schema import RewardConfig
from ctpo_megatron.data.records import ToolCall, Trajectory
from ctpo_megatron.rewards import RewardPool, ScoreReport


def item(final_text: str, answer: str = "2", name: str = "p") -> tuple[Trajectory, str]:
    return Trajectory(prompt_id=name, sample_index=4, seed=0, final_text=final_text), answer


def rewards(items: list[tuple[Trajectory, str]]) -> list[float | None]:
    return [trajectory.reward for trajectory, _ in items]


@pytest.fixture(scope="module")
def unruly():
    with RewardPool(RewardConfig(timeout_s=0.5), scorer=misbehaving) as pool:
        yield pool


def test_math_scores_in_order_with_counts():
    boxes = [r"\boxed{2}", r"\boxed{3}", "2", r"\boxed{\frac{4}{2}}"]
    items = [item(text) for text in boxes] * 64
    with RewardPool(RewardConfig(workers=2)) as pool:
        assert pool.score([]) == ScoreReport(0, 0, 0, 0)
        started = time.perf_counter()
        report = pool.score(items)
        wall = time.perf_counter() - started
    assert report == ScoreReport(scored=256, no_box=64, timeouts=0, failures=0)
    assert rewards(items) == [1.0, 0.0, 0.0, 1.0] * 64
    assert wall < 5.0  # about 0.15 s on an idle machine


def test_tool_output_and_earlier_turns_do_not_count():
    trajectory, answer = item("I have it.")
    trajectory.tool_calls.append(ToolCall(1, "code_interpreter", {"code": "print(2)"}, "success", r"\boxed{2}", 0.0))
    with RewardPool(RewardConfig()) as pool:
        assert pool.score([(trajectory, answer)]) == ScoreReport(1, 1, 0, 0)
    assert trajectory.reward == 0.0


@pytest.mark.parametrize("hang", ["hang in C", "sleep"])
def test_a_hang_is_killed_in_time_and_costs_only_itself(unruly, hang, caplog):
    items = [item("2"), item(hang, name="slow"), item("2"), item("5")]
    started = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        report = unruly.score(items)
    assert time.perf_counter() - started < 8.0  # 0.6 s and a new worker's start on an idle machine
    assert report == ScoreReport(scored=3, no_box=4, timeouts=1, failures=0)
    assert rewards(items) == [1.0, 0.0, 1.0, 0.0]
    assert "prompt slow sample 4: the scorer was killed after 0.5 s" in caplog.text


@pytest.mark.parametrize(("how", "shown"), [("die", "ProcessExpired"), ("raise", "broken scorer")])
def test_a_crash_or_exception_is_counted_and_named(unruly, how, shown, caplog):
    items = [item("2"), item(how, name="bad"), item("2")]
    with caplog.at_level(logging.WARNING):
        report = unruly.score(items)
    assert report == ScoreReport(scored=2, no_box=3, timeouts=0, failures=1)
    assert rewards(items) == [1.0, 0.0, 1.0]
    assert "prompt bad sample 4: the scorer failed" in caplog.text
    assert shown in caplog.text


def test_a_reward_that_is_not_finite_stops_the_run(unruly):
    with pytest.raises(ValueError, match="prompt odd sample 4: the scorer returned nan"):
        unruly.score([item("2"), item("nan", name="odd")])
    items = [item("2")]
    assert unruly.score(items).scored == 1  # the pool is still usable


def test_an_unreadable_ground_truth_is_a_failure_not_a_wrong_answer(caplog):
    items = [item(r"\boxed{1}", answer="")]
    with RewardPool(RewardConfig()) as pool:
        assert pool.score(items) == ScoreReport(scored=0, no_box=0, timeouts=0, failures=1)
    assert "cannot read the ground truth" in caplog.text


def test_closing_twice_is_harmless():
    pool = RewardPool(RewardConfig())
    pool.close()
    pool.close()


def descendants(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if "resource_tracker" not in str(child.cmdline())]


def test_a_sigterm_to_all_processes_of_the_job_costs_no_verdict(tmp_path):
    items = [item(f"after {tmp_path / 'go'}")] + [item("2")] * 3
    others = descendants(psutil.Process())
    with RewardPool(RewardConfig(workers=2, timeout_s=30), scorer=misbehaving) as pool:
        everything = descendants(psutil.Process())
        # The fork server's are the workers.
        workers = [process for process in everything if process not in others and process.ppid() != os.getpid()]
        assert len(workers) == 2
        with ThreadPoolExecutor(1) as thread:
            scoring = thread.submit(pool.score, items)
            for process in everything:
                process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            (tmp_path / "go").touch()
            assert scoring.result(timeout=30) == ScoreReport(scored=4, no_box=4, timeouts=0, failures=0)
        assert rewards(items) == [1.0] * 4
        assert descendants(psutil.Process()) == everything
    assert not any(worker.is_running() for worker in workers)


def test_a_worker_killed_by_somebody_else_costs_no_verdict(tmp_path):
    items = [item(f"die unless {tmp_path / 'died before'}"), item("2")]
    with RewardPool(RewardConfig(timeout_s=30), scorer=misbehaving) as pool:
        assert pool.score(items) == ScoreReport(scored=2, no_box=2, timeouts=0, failures=0)
    assert rewards(items) == [1.0, 1.0]
