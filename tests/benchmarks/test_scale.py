"""Simulated time, the engines that take it, and the product's driver on them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scale, scale_cases
from benchmarks.scale_cases import Case, Machine, Size
from benchmarks.simulated_engines import Speed, Workload
from benchmarks.simulated_pool import Pool, Ray
from benchmarks.simulated_time import Clock
from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.engines import GroupTask, Sampling

SPEED = Speed(step_s=0.01, token_s=1e-5, prefill_token_s=0.0, update_s=2.0, tool_s=0.5)


def test_the_clock_moves_from_deadline_to_deadline() -> None:
    clock, seen = Clock(), []
    clock.at(5.0, lambda: seen.append(clock.now))
    clock.at(2.0, lambda: seen.append(clock.now))
    clock.sleep(10.0)
    assert seen == pytest.approx([2.0, 5.0], abs=0.01) and clock.now == pytest.approx(10.0, abs=0.05)


def test_a_thread_that_waits_lets_others_run_and_cpu_time_counts() -> None:
    clock, seen = Clock(), []

    def other() -> None:
        for _ in range(3):
            clock.sleep(1.0)
            seen.append(clock.now)

    thread = clock._threading.Thread(target=other, name="other", daemon=True)
    thread.start()
    assert seen == []  # until this thread waits
    with clock.stage("work"):
        sum(range(2_000_000))
    with clock.free():
        sum(range(2_000_000))
    worked = clock.now
    assert 0.005 < worked == clock.cpu["work"] + clock.cpu[""]
    thread.join(timeout=10.0)
    assert not thread.is_alive() and seen == pytest.approx([1 + worked, 2 + worked, 3 + worked], abs=0.1)


def test_a_lock_and_a_condition_wait_in_simulated_time() -> None:
    clock = Clock()
    lock = clock.lock()
    changed = clock._threading.Condition(lock)

    def other() -> None:
        with changed:
            clock.sleep(3.0)
            changed.notify_all()
            clock.sleep(1.0)

    clock._threading.Thread(target=other, name="other", daemon=True).start()
    clock.sleep(1.0)
    assert not lock.acquire(timeout=0.5) and clock.now == pytest.approx(1.5, abs=0.05)
    assert lock.acquire(timeout=9.0) and clock.now == pytest.approx(4.0, abs=0.05)
    changed.wait(2.0)
    assert clock.now == pytest.approx(6.0, abs=0.05) and lock.count == 1


def test_threads_that_all_wait_for_ever_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="every thread waits for ever"):
        Clock().wait(float("inf"))


def fleet(seats: int = 8, lengths: list[int] | None = None, speed: Speed = SPEED) -> tuple[Clock, Pool, Ray, Workload]:
    clock = Clock()
    workload = Workload([[length] for length in lengths or [100]], 100.0, 1000, len(lengths or [100]))
    config = RolloutConfig(engine={"max_num_seqs": seats})
    pool = Pool(config, clock, speed, workload, 1)
    return clock, pool, Ray(clock, pool, workload, 0.0), workload


def one_turn(workload: Workload) -> None:
    workload.turns = lambda prompt, seed: [int(workload._lengths[workload._numbers[prompt.id]][0])]  # type: ignore[method-assign]


def finish(clock: Clock, ray: Ray, references: list[Any]) -> list[float]:
    while not all(reference.done for reference in references):
        ray.wait([reference for reference in references if not reference.done], timeout=100.0)
    return [reference.done_at for reference in references]


def decoding_s(*contexts: int, tokens: int, speed: Speed = SPEED) -> float:
    """Of sequences that have these contexts when the first of the tokens is decoded."""
    return sum(speed.step_s + speed.token_s * (sum(contexts) + len(contexts) * done) for done in range(tokens))


def test_a_step_takes_longer_the_more_tokens_are_in_it() -> None:
    clock, pool, ray, workload = fleet(lengths=[50, 150])
    one_turn(workload)
    short, long = (pool.engines[0].submit(GroupTask(p, 1, (0,), Sampling())) for p in workload.prompts)
    ends = finish(clock, ray, [short, long])
    both = decoding_s(150, 150, tokens=50)
    assert ends == pytest.approx([both, both + decoding_s(200, tokens=100)], abs=0.02)
    pool.engines[0].take_stock()
    assert pool.engines[0].busy_s == pytest.approx(ends[1], abs=0.02)


def test_sequences_beyond_the_seats_wait_and_earlier_steps_go_first() -> None:
    clock, pool, ray, workload = fleet(seats=1, lengths=[100, 100, 100])
    one_turn(workload)
    steps = [GroupTask(p, step, (0,), Sampling()) for p, step in zip(workload.prompts, (1, 3, 2), strict=True)]
    ends = finish(clock, ray, [pool.engines[0].submit(task) for task in steps])
    each = decoding_s(150, tokens=100)
    assert ends == pytest.approx([each, 3 * each, 2 * each], abs=0.05)


def test_a_full_cache_preempts_the_last_sequence_which_is_computed_again() -> None:
    speed = replace(SPEED, token_s=0.0, prefill_token_s=0.001, cache_tokens=400.0)
    clock, pool, ray, workload = fleet(lengths=[100, 100], speed=speed)
    one_turn(workload)
    engine = pool.engines[0]
    ends = finish(clock, ray, [engine.submit(GroupTask(p, 1, (0,), Sampling())) for p in workload.prompts])
    # Two prompts of 150 tokens, 50 tokens of each until 400 are held, and the first alone to its end; then again 200.
    assert ends == pytest.approx([0.3 + 1.0, 0.3 + 1.0 + 0.2 + 0.5], abs=0.05)
    engine.take_stock()
    assert engine.preempted == 1 and engine.again_s == pytest.approx(0.2, abs=0.01)
    assert engine.busy_s == pytest.approx(ends[1], abs=0.05)


def test_a_turn_after_a_tool_computes_its_context_again_only_when_its_keys_are_gone() -> None:
    speed = replace(SPEED, token_s=0.0, prefill_token_s=0.01, update_s=0.0)
    for update, again in ((False, 0), (True, 150 + 50 + 40)):
        clock, pool, ray, workload = fleet(speed=speed)
        workload.turns = lambda prompt, seed: [50, 50]  # type: ignore[method-assign]
        reference = pool.engines[0].submit(GroupTask(workload.prompts[0], 1, (0,), Sampling()))
        clock.sleep(1.5 + 0.5 + 0.001)  # within the call of its tool
        if update:
            pool.send(None, 1)
        finish(clock, ray, [reference])
        assert pool.engines[0].again_s == pytest.approx(again * 0.01)


def test_new_weights_stop_an_engine_and_stamp_the_tokens_that_follow() -> None:
    clock, pool, ray, workload = fleet(speed=replace(SPEED, token_s=0.0, prefill_token_s=0.001))
    one_turn(workload)
    reference = pool.engines[0].submit(GroupTask(workload.prompts[0], 1, (0,), Sampling()))
    clock.sleep(0.15 + 0.5)  # 50 tokens
    pool.send(None, 7)
    recomputed = 0.2
    assert finish(clock, ray, [reference]) == pytest.approx([0.15 + 1.0 + SPEED.update_s + recomputed], abs=0.05)
    assert pool.engines[0].again_s == pytest.approx(recomputed, abs=0.01)
    (trajectory,) = ray.get(reference, timeout=1.0).trajectories or []
    versions = [version for version in trajectory.weight_version if version >= 0]
    assert versions == sorted(versions) and versions.count(7) == pytest.approx(50, abs=3)


def test_an_engine_that_dies_loses_its_groups() -> None:
    clock, pool, ray, workload = fleet()
    reference = pool.engines[0].submit(GroupTask(workload.prompts[0], 1, (0,), Sampling()))
    clock.sleep(0.1)
    pool.engines[0].die()
    with pytest.raises(Exception, match="actor"):
        ray.get(reference, timeout=1.0)
    late = pool.engines[0].submit(GroupTask(workload.prompts[0], 1, (1,), Sampling()))
    with pytest.raises(Exception, match="actor"):  # nobody knows yet that it is dead
        ray.get(late, timeout=1.0)
    pool.restart(pool.engines[0])
    clock.sleep(SPEED.start_s + 1)
    pool.register_started()
    assert pool.engines[0].parked and not pool.engines[0].live
    pool.send(None, 1)
    assert pool.engines[0].live and pool.engines[0].launches == 2


def test_an_update_waits_for_an_engine_that_starts() -> None:
    clock, pool, _, _ = fleet()
    pool.engines[0].die()
    pool.send(None, 1)
    assert clock.now == pytest.approx(SPEED.start_s + SPEED.update_s, abs=0.05) and pool.engines[0].live


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scale_cases.SIZES, 2, Size(2, "4B", 4, 1))
    monkeypatch.setitem(scale_cases.SIZES, 5, Size(5, "4B", 8, 1))


def simulate(variant: str, gpus: int = 2, **changed: Any) -> dict[str, Any]:
    return scale.simulate(Case(gpus, variant, 600.0, **changed), Machine(mfu=0.03))


@pytest.mark.usefixtures("tiny")
def test_the_driver_trains_what_it_sampled_and_sampling_ahead_overlaps() -> None:
    default, ahead = simulate("default"), simulate("max_staleness 1")
    assert default["tokens a step"] == pytest.approx(ahead["tokens a step"], rel=0.2)
    assert default["staleness"] == 0 < ahead["staleness"] <= 1
    for found in (default, ahead):
        assert 0 < found["serial s"] < 2 and 0 < found["cpu"][scale.PACKING] < 1
    turns = default["trainer computes"] + default["engines work"]
    assert 0.5 < turns < 1 < ahead["trainer computes"] + ahead["engines work"]
    assert ahead["samples/s"] > 1.2 * default["samples/s"]
    assert ahead["GPUs wait"] < default["GPUs wait"]


@pytest.mark.usefixtures("tiny")
def test_engines_that_die_cost_time_and_no_sample() -> None:
    well, ill = simulate("default", 5), simulate("default", 5, deaths_per_hour=60.0)
    assert ill["engine restarts"] > 0 and ill["seconds a step"] > well["seconds a step"]
    assert ill["tokens a step"] == well["tokens a step"]


def test_result_files_gain_cases_and_replace_the_same_one(tmp_path: Path) -> None:
    row = {
        **asdict(Case(8, "default", 3_300.0, trainers=4)),
        **{"seconds a step": 10.0, "serial s": 0.5, "samples/s": 5.0, "trainer computes": 0.5, "engines work": 0.4},
        **{"GPUs wait": 0.6, "staleness": 0.0, "cpu": {"pack": 0.2}, "peak MiB": 700.0, "start MiB": 600.0},
        **{"computed again": 0.1, "preempted a step": 3.0, "engine restarts": 1.0, "commit": "abcdefabcdef"},
        "machine": asdict(Machine()),
    }
    scale.add(row, tmp_path)
    scale.add(row | {"variant": "max_staleness 4", "machine": asdict(Machine(mfu=0.2))}, tmp_path)
    scale.add(row | {"serial s": 1.0}, tmp_path)
    lines = [line for line in (tmp_path / "scale.md").read_text().splitlines() if line.startswith("| 8 (4) ")]
    assert len(lines) == 2 and "1.00 (10.0%)" in "".join(lines) and "max_staleness 4, mfu 0.2" in "".join(lines)


def test_recorded_lengths_have_a_long_tail() -> None:
    groups = json.loads(scale_cases.LENGTHS.read_text())["groups"]
    lengths = sorted(length for group in groups for length in group)
    assert len(groups) >= 16 and lengths[int(0.99 * len(lengths))] > 3 * lengths[len(lengths) // 2]
