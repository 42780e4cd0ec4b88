"""What a reward function does instead of judging costs one trajectory, is counted by cause, and logged by name."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import psutil
import pytest
from pebble import ProcessFuture, ProcessPool
from pebble.pool.process import WorkerManager

from ctpo_megatron.base.extensions import ExtensionError
from ctpo_megatron.config.schema import RewardConfig
from ctpo_megatron.data.records import MissingCause, Prompt, ToolCall
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.rewards import RewardPool, RewardWorkersLost, ScoreReport
from tests.rewards.misbehaving_reward import RAISED
from tests.support.deadlines import scaled
from tests.support.kills import with_word
from tests.support.recorded import through_a_file

HERE = Path(__file__).parent


def group(*final_texts: str, answer: str = "2", name: str = "p", source: str = "test") -> Group:
    """One prompt with a trajectory for each text."""
    trajectories = [
        Trajectory(prompt_id=name, sample_index=4 + n, seed=0, final_text=text) for n, text in enumerate(final_texts)
    ]
    return Group(Prompt(name, source, (), answer, (), {}), trajectories)


def rewards(groups: list[Group]) -> list[float | None]:
    return [trajectory.reward for group in groups for trajectory in group.trajectories]


def causes(groups: list[Group]) -> list[str]:
    """Why each trajectory has no verdict; "" where it has one."""
    everything = [trajectory.no_verdict for group in groups for trajectory in group.trajectories]
    return ["" if missing is None else missing.cause for missing in everything]


TIMEOUT_S = 3.0
"""Of a reward that hangs; one that is to answer does so in time on a busy machine, too."""


def misbehaving(name: str = "misbehaving", timeout_s: float = TIMEOUT_S, **settings: Any) -> RewardPool:
    config = RewardConfig(
        function={"name": f"misbehaving_reward:{name}"},
        timeout_s=scaled(timeout_s),
        **settings,
    )
    return RewardPool(config, [str(HERE)])


@pytest.fixture(scope="module")
def unruly() -> Iterator[RewardPool]:
    with misbehaving() as pool:
        yield pool


def test_math_scores_in_order_with_counts() -> None:
    groups = [group(r"\boxed{2}", r"\boxed{3}", "2", r"\boxed{\frac{4}{2}}") for _ in range(64)]
    with RewardPool(RewardConfig(workers=2)) as pool:
        assert asyncio.run(pool.score([])) == ScoreReport(0)
        report = asyncio.run(pool.score(groups))
    assert report == ScoreReport(scored=256, metrics={"no_box": 64.0})
    assert rewards(groups) == [1.0, 0.0, 0.0, 1.0] * 64


def test_a_trajectory_says_when_it_was_scored(unruly: RewardPool) -> None:
    """Also one without a verdict."""
    groups = [group("2"), group("raise")]
    before = time.time()
    asyncio.run(unruly.score(groups))
    for one in groups:
        assert (times := one.trajectories[0].scored_at) is not None
        assert before <= times[0] <= times[1] <= time.time()


def test_tool_output_and_earlier_turns_do_not_count() -> None:
    silent = group("I have it.")
    call = ToolCall(1, "code_interpreter", {"code": "print(2)"}, "success", r"\boxed{2}", 0.0)
    silent.trajectories[0].tool_calls.append(call)
    with RewardPool(RewardConfig()) as pool:
        assert asyncio.run(pool.score([silent])) == ScoreReport(1, {}, {"no_box": 1.0})
    assert rewards([silent]) == [0.0]


def test_what_cannot_be_computed_is_wrong_and_counted() -> None:
    """The ground truth was compared when it was read, so the fault is the answer's."""
    endless = r"\boxed{\int_0^1 \frac{\sin(x^3)e^{x^2}}{1+x^5}dx}"
    groups = [group(r"\boxed{9^{9^{9}}}", endless, r"\boxed{2}")]
    with RewardPool(RewardConfig(timeout_s=scaled(20))) as pool:
        report = asyncio.run(pool.score(groups))
    assert report == ScoreReport(3, {}, {"no_box": 0.0, "uncomputable": 1.0})
    assert rewards(groups) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("hang", ["hang in C", "sleep"])
def test_a_hang_is_killed_and_costs_only_itself(
    unruly: RewardPool, hang: str, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [group("2"), group(hang, name="slow"), group("2", "5")]
    with caplog.at_level(logging.WARNING):
        # The hang itself would take an hour; the deadline here is far beyond what a busy machine needs.
        report = asyncio.run(asyncio.wait_for(unruly.score(groups), scaled(60)))
    assert report == ScoreReport(3, {"timeout": 1})
    assert rewards(groups) == [1.0, None, 1.0, 0.0]
    assert causes(groups) == ["", "timeout", "", ""]
    assert f"prompt slow sample 4: the scorer was killed after {scaled(TIMEOUT_S):g} s, no verdict" in caplog.text


@pytest.mark.parametrize(
    ("how", "cause", "shown"),
    [
        ("die", "crash", "failed (ProcessExpired"),
        ("raise", "exception", "failed (KeyError: 'broken scorer' at "),
        *((name, "exception", f"failed ({type(error).__name__}") for name, error in RAISED.items()),
        ("text", "exception", "failed (ValueError: could not convert string to float"),
        ("component of text", "exception", "failed (ValueError: could not convert string to float"),
        ("complex", "exception", "failed (TypeError"),
        ("too large for a float", "exception", "failed (OverflowError"),
        ("none", "none", "returned None"),
        ("none in a Reward", "none", "returned None"),
        ("nan", "not_finite", "returned nan"),
        ("numpy nan", "not_finite", "returned nan"),
        ("array nan", "not_finite", "returned nan"),
        ("decimal nan", "not_finite", "returned nan"),
        ("infinite", "not_finite", "returned -inf"),
        ("nearly infinite", "not_finite", "returned 1e+308"),
        ("nan in a Reward", "not_finite", "returned nan"),
        ("infinite component", "not_finite", "returned length=inf"),
        ("nan metric", "not_finite", "returned length=nan"),
        ("half a character", "exception", r"failed (ValueError: \ud800\x1b]0;title\x07 at "),
        ("reserved name", "exception", "failed (ValueError: a component or metric is named 'mean'"),
        ("same name twice", "exception", "named 'length'. Names must be unique"),
        ("slash in a name", "exception", "named 'a/b'"),
        ("half a name", "exception", r"named '\ud800'"),
        ("escape in a name", "exception", r"named '\x1b[2J'"),
        ("number as a name", "exception", "named 1. Names"),
        ("name of a class", "exception", "named 'length'"),
    ],
)
def test_what_is_no_verdict_is_counted_by_cause_and_named(
    unruly: RewardPool, how: str, cause: MissingCause, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [group("2"), group(how, name="bad"), group("2")]
    with caplog.at_level(logging.WARNING):
        report = asyncio.run(unruly.score(groups))
    assert report == ScoreReport(2, {cause: 1})
    assert rewards(groups) == [1.0, None, 1.0]
    assert causes(groups) == ["", cause, ""]
    (line,) = [record.message for record in caplog.records if record.name.startswith("ctpo_megatron")]
    assert line.startswith("prompt bad sample 4: the scorer ") and shown in line and line.endswith(", no verdict")
    assert line.isprintable()
    (bad,) = groups[1].trajectories
    assert bad.no_verdict is not None and shown in bad.no_verdict.reason
    assert through_a_file([bad]) == [bad]


def test_what_a_reward_prints_goes_to_its_log_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = RewardConfig(function={"name": "misbehaving_reward:misbehaving"}, timeout_s=scaled(5))
    with RewardPool(config, [str(HERE)], tmp_path / "logs" / "rewards.log") as pool:
        assert asyncio.run(pool.score([group("print")])).scored == 1
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "logs" / "rewards.log").read_bytes() == b"\x1b]0;title\x07\n\x1b[2J"


def test_a_sample_that_is_judged_later_has_its_verdict(unruly: RewardPool) -> None:
    """A recording is scored anew when it is replayed."""
    again = group("raise")
    asyncio.run(unruly.score([again]))
    again.trajectories[0].final_text = "2"
    asyncio.run(unruly.score([again]))
    assert again.rewards == [1.0] and causes([again]) == [""]
    again.trajectories[0].final_text = "raise"
    asyncio.run(unruly.score([again]))
    assert again.rewards == [None] and again.verdicts == []


def test_no_secret_of_an_exception_is_kept(unruly: RewardPool, caplog: pytest.LogCaptureFixture) -> None:
    groups = [group("login")]
    asyncio.run(unruly.score(groups))
    (found,) = groups[0].trajectories
    assert found.no_verdict is not None and "http://***@judge" in found.no_verdict.reason
    assert "hunter2" not in found.no_verdict.reason + caplog.text


def test_a_reason_is_one_line_of_bounded_length(unruly: RewardPool) -> None:
    groups = [group("long")]
    asyncio.run(unruly.score(groups))
    (found,) = groups[0].trajectories
    assert found.no_verdict is not None and "\n" not in found.no_verdict.reason
    assert 500 < len(found.no_verdict.reason) <= 1000


def test_an_unreadable_ground_truth_is_a_failure_not_a_wrong_answer(caplog: pytest.LogCaptureFixture) -> None:
    with RewardPool(RewardConfig()) as pool:
        assert asyncio.run(pool.score([group(r"\boxed{1}", answer="")])) == ScoreReport(0, {"exception": 1})
    assert "cannot read the ground truth" in caplog.text


def test_async_rewards_that_wait_are_given_up_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    groups = [group("2", "wait for ever", "5", "raise", "refuse to be cancelled", "2")]
    with misbehaving("misbehaving_async") as pool:
        children = psutil.Process().children(recursive=True)
        assert asyncio.run(pool.score(groups)) == ScoreReport(3, {"timeout": 2, "exception": 1})
        assert rewards(groups) == [1.0, None, 0.0, None, None, 1.0]
        assert psutil.Process().children(recursive=True) == children  # no worker had to be killed
        assert asyncio.run(pool.score([group("2", "2")])).scored == 2
    assert "prompt p sample 5: the scorer was killed" in caplog.text
    assert "prompt p sample 8: the scorer was killed" in caplog.text


ASYNC_FAULTS: dict[str, MissingCause] = {
    **dict.fromkeys(RAISED, "exception"),
    "sleep": "timeout",
    "die": "crash",
}


@pytest.mark.parametrize(("how", "cause"), ASYNC_FAULTS.items())
def test_a_fault_of_an_async_reward_costs_only_itself(how: str, cause: MissingCause) -> None:
    """What is no Exception, a hang, or an end of the process; also of one that is called alone."""
    together, alone = [group("2", how, "5", "2")], [group(how)]
    with misbehaving("misbehaving_async", 5.0) as pool:
        assert asyncio.run(pool.score(together)) == ScoreReport(3, {cause: 1})
        assert rewards(together) == [1.0, None, 0.0, 1.0]
        if how in RAISED:
            assert asyncio.run(pool.score(alone)) == ScoreReport(0, {cause: 1}) and rewards(alone) == [None]
        assert asyncio.run(pool.score([group("2", "2")])).scored == 2


def test_a_reward_that_is_not_there_is_said_at_the_start() -> None:
    with pytest.raises(ExtensionError, match="misbehaving_reward has no 'missing'"):
        misbehaving("missing")


def test_closing_twice_is_harmless() -> None:
    pool = RewardPool(RewardConfig())
    pool.close()
    pool.close()


def fork_server() -> psutil.Process:
    """Whose children the workers of all pools are."""
    (server,) = with_word(psutil.Process().children(), "forkserver")
    return server


def test_a_sigterm_to_all_processes_of_the_job_costs_no_verdict(tmp_path: Path) -> None:
    groups = [group(f"after {tmp_path / 'go'}", "2", "2", "2")]
    others = psutil.Process().children(recursive=True)
    with misbehaving(workers=2, timeout_s=30) as pool:
        server = fork_server()
        workers = [process for process in server.children() if process not in others]
        assert len(workers) == 2
        with ThreadPoolExecutor(1) as thread:
            scoring = thread.submit(asyncio.run, pool.score(groups))
            for process in (server, *workers):
                process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            (tmp_path / "go").touch()
            assert scoring.result(timeout=scaled(30)) == ScoreReport(4)
        assert rewards(groups) == [1.0] * 4
        assert (
            fork_server() == server and [process for process in server.children() if process not in others] == workers
        )
    assert not any(worker.is_running() for worker in workers)


def test_a_fork_server_that_replaces_a_killed_one_is_spared_as_well() -> None:
    with misbehaving(timeout_s=30) as pool:
        killed = fork_server()
        killed.kill()
        deadline = time.monotonic() + scaled(10)
        while killed.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:  # multiprocessing reaps it
            time.sleep(0.01)
        assert asyncio.run(pool.score([group("2", "5")])) == ScoreReport(2)
        server = fork_server()
        assert server != killed
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert asyncio.run(pool.score([group("2")])) == ScoreReport(1)
        assert fork_server() == server


def test_a_worker_killed_by_somebody_else_costs_no_verdict(tmp_path: Path) -> None:
    groups = [group(f"die unless {tmp_path / 'died before'}", "2")]
    with misbehaving(timeout_s=30) as pool:
        assert asyncio.run(pool.score(groups)) == ScoreReport(2)
    assert rewards(groups) == [1.0, 1.0]


def idle_worker(others: Sequence[psutil.Process]) -> psutil.Process:
    """A worker that is not one of `others`; pebble may take a moment to replace one."""
    deadline = time.monotonic() + scaled(30)
    while time.monotonic() < deadline:
        if idle := [process for process in fork_server().children() if process not in others]:
            return idle[0]
        time.sleep(0.05)
    raise AssertionError("no worker was started")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_killed_while_it_had_nothing_to_do_costs_no_verdict(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scored() -> tuple[ScoreReport, ScoreReport]:
        first = asyncio.create_task(pool.score([group("2", "5")]))  # pebble may not have seen it yet
        await asyncio.sleep(0.3)
        async with asyncio.timeout(scaled(60)):
            return await first, await pool.score([group("2")])

    others = psutil.Process().children(recursive=True)
    with misbehaving(timeout_s=30, workers=workers) as pool:
        for _ in range(2):
            others.append(idle_worker(others))
            others[-1].kill()
            assert asyncio.run(scored()) == (ScoreReport(2), ScoreReport(1))
    assert "the reward workers were killed; they are replaced" in caplog.text


def test_workers_that_somebody_kills_again_and_again_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(*_: object) -> str:
        return "were killed"

    with misbehaving(timeout_s=30) as pool:
        monkeypatch.setattr("ctpo_megatron.rewards.workers.Workers._await", gone)
        with pytest.raises(RewardWorkersLost, match=r"were killed, 5 times; is something killing them\?"):
            asyncio.run(pool.score([group("2")]))


def workers_that_do_not_start(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where their fork server is killed each time it has been started."""
    real, failed = WorkerManager.new_worker, itertools.count()

    def new_worker(manager: WorkerManager) -> None:
        if next(failed) < times:
            raise BrokenProcessPool("no fork server") from EOFError()
        real(manager)

    monkeypatch.setattr(WorkerManager, "new_worker", new_worker)


def test_new_workers_that_are_killed_while_they_start_cost_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    with misbehaving(timeout_s=30) as pool:
        for idle in fork_server().children():
            idle.kill()
        workers_that_do_not_start(3, monkeypatch)
        assert asyncio.run(pool.score([group("2")])) == ScoreReport(1)


def test_workers_that_are_killed_while_they_first_start_are_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers_that_do_not_start(3, monkeypatch)
    with misbehaving(timeout_s=30) as pool:
        assert asyncio.run(pool.score([group("2")])) == ScoreReport(1)
    assert caplog.text.count("the reward workers did not start") == 3


def test_workers_that_do_not_start_five_times_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    workers_that_do_not_start(5, monkeypatch)
    with pytest.raises(RewardWorkersLost, match=r"did not start \(BrokenProcessPool.*\), 5 times"):
        misbehaving(timeout_s=30)


def test_a_start_that_no_worker_answers_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one that is frozen before it takes a task: pebble's own limit begins with that."""
    monkeypatch.setattr("ctpo_megatron.rewards.pool.START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(ProcessPool, "schedule", lambda *_, **__: ProcessFuture())
    monkeypatch.setattr(ProcessPool, "active", True)
    with pytest.raises(RewardWorkersLost, match="as if one of them were frozen, 5 times"):
        misbehaving(timeout_s=30)


def test_new_workers_that_never_start_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with misbehaving(timeout_s=30) as pool:
        pool._workers._pool.stop()
        workers_that_do_not_start(math.inf, monkeypatch)
        with pytest.raises(RewardWorkersLost, match=r"did not start .*, 5 times; is something killing them\?"):
            asyncio.run(pool.score([group("2")]))


def test_a_worker_frozen_while_it_had_nothing_to_do_costs_no_verdict(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctpo_megatron.rewards.pool.START_MARGIN_S", 0.0)
    others = psutil.Process().children(recursive=True)
    with misbehaving(workers=2) as pool:
        frozen = [process for process in fork_server().children() if process not in others]
        for process in frozen:
            process.suspend()
        assert asyncio.run(asyncio.wait_for(pool.score([group("2", "5")]), scaled(60))) == ScoreReport(2)
    assert "as if one of them were frozen; they are replaced" in caplog.text
    assert not any(process.is_running() for process in frozen)
