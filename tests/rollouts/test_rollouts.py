"""Batches by engines that follow a script, ahead or not: order, pacing, updates in flight, accounting, resuming."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.run_paths import AHEAD
from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data import Batch, Prompt, PromptSampler, Trajectory
from ctpo_megatron.data.trajectory_file import encode_ahead, read_ahead
from ctpo_megatron.engines import GroupTask
from ctpo_megatron.rollouts import (
    AccountingError,
    EventLoop,
    GroupSampler,
    Quarantined,
    Rollouts,
    TooManyQuarantined,
)
from ctpo_megatron.tracking import Phases
from tests.rollouts.scripted import BrokenEngines, RecordedPhases, ScriptedEngines, ScriptedScorer, quarantined

PROMPTS = [Prompt(f"p{n}", "test", (), str(n), (1, 2, n + 3)) for n in range(50)]
ORDER = [prompt.id for prompt in PromptSampler(PROMPTS, seed=0).take(200)]
STEPS = 6


def reward(prompt_id: str, sample: int) -> float:
    """Two different rewards for two prompts of three, else none."""
    return float(sample) if int(prompt_id[1:]) % 3 else 0.0


class Run:
    """What a run does with its rollouts, without the training. done: steps that `state` is after."""

    def __init__(
        self,
        engines: ScriptedEngines | None = None,
        *,
        steps: int = STEPS,
        stop: threading.Event | None = None,
        prompts: PromptSampler | None = None,
        scorer: ScriptedScorer | None = None,
        phases: Phases | None = None,
        done: int = 0,
        state: Any = None,
        mini: int = 2,
        by_turn: bool = False,
        **settings: Any,
    ) -> None:
        self.engines = engines or ScriptedEngines()
        config = RolloutConfig(
            **{"prompts_per_step": 4, "samples_per_prompt": 2, "max_staleness": 1, "group_timeout_s": 20} | settings
        )
        self.prompts = prompts or PromptSampler(PROMPTS, seed=0)
        self.loop, self.scorer = EventLoop(), scorer or ScriptedScorer(reward)
        self.source = Rollouts(
            config,
            self.loop,
            GroupSampler(self.engines, config),
            self.scorer,
            self.prompts,
            stop or threading.Event(),
            phases or Phases(),
            steps=steps,
            mini_batch_prompts=mini,
            by_turn=by_turn,
        )
        self.done, self.steps = done, steps
        if state is not None:
            self.source.load_state_dict(state)
        self.trained: list[Batch] = []

    @contextmanager
    def going(self) -> Iterator[Run]:
        """It samples, with the weights of the steps done."""
        with self.loop, self.source:
            self.publish()
            yield self

    def publish(self, *, stopped: bool = False) -> None:
        trainer: Any = None  # scripted engines take nothing from it
        assert self.source.publish(trainer, self.done + 1) is not stopped

    def train(self, until: int | None = None) -> Run:
        while self.done < (until or self.steps):
            batch = self.source.next_batch(self.done + 1)
            assert batch is not None
            self.trained.append(batch)
            self.done += 1
            self.publish()
        return self

    def state(self) -> Any:
        """As a checkpoint has it."""
        kept = self.source.state_dict()
        ahead = kept.pop("ahead", None)
        state = json.loads(json.dumps(kept))
        if ahead is None:
            return state
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / AHEAD).write_bytes(encode_ahead(ahead))
            return state | {"ahead": read_ahead(Path(folder))}

    @property
    def ids(self) -> list[str]:
        """Of all prompts trained on or dropped, in the order of sampling."""
        return [group.prompt.id for batch in self.trained for group in batch.groups]


def lags(run: Run) -> dict[int, set[int]]:
    """Step -> how many versions its tokens are behind."""
    found = {}
    for step, batch in enumerate(run.trained, start=1):
        versions = {v for t in batch.trajectories for v in t.weight_version if v >= 0}
        assert batch.weight_versions == tuple(sorted(versions))
        found[step] = {step - version for version in versions}
    return found


@pytest.mark.parametrize("partial", ["continue", "finish"])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_batches_come_in_prompt_order_and_are_at_most_so_stale(ahead: int, partial: str) -> None:
    for seed in range(3):
        with Run(ScriptedEngines(seed), max_staleness=ahead, partial=partial).going() as run:
            run.train()
        assert run.ids == ORDER[: 4 * STEPS]
        assert all(min(lag) >= 0 and max(lag) <= ahead for lag in lags(run).values())
        assert all(run.engines.begun[step, index] >= max(1, step - ahead) for step in range(1, 7) for index in range(4))
        assert run.prompts.taken == 4 * STEPS  # nothing is sampled that no step trains on


def test_a_batch_is_scored_and_says_where_it_comes_from() -> None:
    phases = RecordedPhases()
    with Run(max_staleness=0, phases=phases).going() as run:
        run.engines.counts.update({"sync_bytes": 4 * 10**9, "sync_s": 2})
        batch = run.train(until=1).trained[0]
    assert [t.prompt_id for t in batch.trajectories] == [name for name in ORDER[:4] for _ in range(2)]
    assert [group.rewards for group in batch.groups] == [[reward(name, n) for n in range(2)] for name in ORDER[:4]]
    assert batch.weight_versions == (1,) and run.prompts.state_dict()["consumed"] == ORDER[:4]
    assert batch.metrics["reward/mean"] == sum(reward(name, 1) for name in ORDER[:4]) / 8
    assert batch.metrics["rollout/sync_gb_per_s"] == 2.0 and batch.metrics["rollout/quarantined"] == 0.0
    assert phases.names == ["rollout", "reward"] and phases.advanced == 4


def test_groups_are_scored_while_others_are_sampled() -> None:
    scorer, begun = ScriptedScorer(), list[int]()

    class Watched(ScriptedEngines):
        async def sample(self, engine: Any, task: GroupTask) -> list[Trajectory]:
            try:
                return await super().sample(engine, task)
            finally:
                begun.append(len(scorer.begun))

    with Run(Watched(), scorer=scorer, max_staleness=0, prompts_per_step=8).going() as run:
        assert [group.rewards for group in run.train(until=1).trained[0].groups] == [[0.0, 1.0]] * 8
    assert begun[0] == 0 and begun[-1] >= 4


def test_a_resumed_run_goes_on_and_remembers_its_quarantine() -> None:
    with Run(max_staleness=0).going() as before:
        before.train(until=1)
        quarantined(before.source).append(Quarantined(ORDER[5], 1, "it hung"))
        state = before.state()
    after = Run(max_staleness=0, done=1, state=state)
    assert quarantined(after.source) == [Quarantined(ORDER[5], 1, "it hung")]
    with after.going():
        assert after.train(until=2).ids == [ORDER[4], ORDER[8], *ORDER[6:8]]  # the next one takes its place


def test_a_batch_is_the_one_of_the_synchronous_order_when_nothing_is_stale() -> None:
    with Run(max_staleness=0).going() as run:
        expected = run.train(until=1).trained[0]
    with Run().going() as run:
        batch = run.train(until=1).trained[0]
    assert batch.groups == expected.groups and batch.weight_versions == expected.weight_versions == (1,)
    stale = {name for name in batch.metrics if "stale" in name or name == "rollout/continued_tokens"}
    assert {name: batch.metrics[name] for name in stale} == dict.fromkeys(stale, 0.0) and len(stale) == 4
    assert set(batch.metrics) - stale == set(expected.metrics)


@pytest.mark.parametrize("uniform", ["keep", "refill"])
@pytest.mark.parametrize("lag", [1, 2, 4])
def test_with_a_lag_every_step_is_of_the_version_before_it_whatever_the_timing(lag: int, uniform: str) -> None:
    settings = {"max_staleness": 0, "lag": lag, "uniform_groups": uniform}
    found = []
    for seed in range(3):
        with Run(ScriptedEngines(seed, lost={ORDER[2]}), **settings).going() as run:
            run.train()
        expected = [(max(1, step - lag),) for step in range(1, STEPS + 1)]
        assert [batch.weight_versions for batch in run.trained] == expected
        found.append([(t.prompt_id, t.seed) for batch in run.trained for t in batch.trajectories])
        assert run.engines.in_update == 0
    assert found[0] == found[1] == found[2]


class Learning(PromptSampler):
    """Draws from what it has learned so far."""

    def __init__(self) -> None:
        super().__init__(PROMPTS, seed=0)
        self.learned = list[str]()

    def take(self, count: int) -> list[Prompt]:
        drawn = random.Random(f"{self.taken} {self.learned}").choices(PROMPTS, k=count)
        self.taken += count
        return drawn

    def learn(self, rewards: Any) -> None:
        self.learned += rewards

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "learned": list(self.learned)}

    def load_state_dict(self, state: Any) -> None:
        self.taken, self.learned = state["taken"], list(state["learned"])


def test_with_a_lag_a_sampler_that_learns_draws_the_same_whatever_the_timing() -> None:
    settings = {"max_staleness": 0, "lag": 2, "uniform_groups": "refill", "max_refills": 3}
    found = []
    for seed, resumed_after in itertools.product(range(4), (0, 2)):
        state, runs = None, list[Run]()
        for done, until in [(0, resumed_after), (resumed_after, STEPS)] if resumed_after else [(0, STEPS)]:
            runs.append(Run(ScriptedEngines(seed), prompts=Learning(), done=done, state=state, **settings))
            runs[-1].engines.version = done
            with runs[-1].going() as run:
                for step in range(done + 1, until + 1):
                    time.sleep(0.02 * (seed % 2))  # so that refills come before the batch is taken, or after
                    run.train(until=step)
                state = run.state()
        found.append([(t.prompt_id, t.seed) for run in runs for batch in run.trained for t in batch.trajectories])
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("done", [1, 3])
def test_a_run_with_a_lag_that_is_resumed_has_the_batches_of_the_whole_one(done: int) -> None:
    settings = {"max_staleness": 0, "lag": 2, "uniform_groups": "refill"}
    with Run(**settings).going() as whole:
        whole.train()
    with Run(ScriptedEngines(1), **settings).going() as first:
        first.train(until=done)
        state = first.state()
    second = Run(ScriptedEngines(2), done=done, state=state, **settings)
    second.engines.version = done
    with second.going():
        second.train()
    resumed, expected = (
        [(t.prompt_id, t.seed, list(t.weight_version)) for batch in run for t in batch.trajectories]
        for run in (first.trained + second.trained, whole.trained)
    )
    assert resumed == expected


def test_nothing_is_sampled_between_batches_that_are_not_sampled_ahead() -> None:
    with Run(max_staleness=0).going() as run:
        run.train(until=2)
        time.sleep(0.05)
        assert run.engines.in_flight == 0 and max(step for step, _ in run.engines.begun) == 2


def test_the_next_batch_is_begun_while_stragglers_are_in_flight() -> None:
    with Run(ScriptedEngines(stuck=[(1, 2)])).going() as run:
        deadline = time.monotonic() + 10
        while run.engines.in_flight > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert {step for step, _ in run.engines.begun} == {1, 2} and run.engines.in_flight == 1
        run.engines.stuck.clear()
        run.train()


def test_an_update_finds_in_flight_what_goes_on_with_it() -> None:
    with Run(ScriptedEngines(stuck=[(2, 1)])).going() as run:
        run.train(until=1)
        assert run.engines.in_update >= 1
        run.engines.stuck.clear()
        run.train()
    metrics = run.trained[1].metrics
    continued = [t for t in run.trained[1].trajectories if len(set(t.weight_version[3:])) > 1]
    assert [t.weight_version[3:] for t in continued if t.prompt_id == ORDER[5]] == [[1, 2], [1, 2]]
    assert metrics["rollout/continued_tokens"] == len(continued) / 16
    assert metrics["tokens/stale"] == sum(v == 1 for t in run.trained[1].trajectories for v in t.weight_version)
    assert metrics["rollout/staleness_mean"] == metrics["tokens/stale"] / 16 and metrics["rollout/staleness_max"] == 1


def test_an_update_waits_for_what_is_in_flight_where_it_is_to_finish() -> None:
    with Run(ScriptedEngines(stuck=[(2, 1)]), partial="finish").going() as run:
        timer = threading.Timer(0.2, run.engines.stuck.clear)
        timer.start()
        run.train()
        timer.join()
    assert run.engines.in_update == 0
    assert all(len(set(t.weight_version[3:])) == 1 for batch in run.trained for t in batch.trajectories)
    assert {max(lag) for lag in lags(run).values()} == {0, 1}


@pytest.mark.parametrize("partial", ["continue", "finish"])
def test_a_run_that_is_asked_to_end_does_not_wait_for_stragglers(partial: str) -> None:
    stop = threading.Event()
    with Run(ScriptedEngines(stuck=[(2, 1)]), partial=partial, stop=stop).going() as run:
        assert run.source.next_batch(1) is not None
        run.done = 1
        stop.set()
        setattr(run.engines, "wait_ready", None)  # noqa: B010 - no further wait for engines
        began = time.monotonic()
        run.publish(stopped=True)
        assert run.engines.version == 1 and run.source.next_batch(2) is None
        state = run.state()
        assert time.monotonic() < began + 5
    [batch, *_] = state["ahead"]["batches"]
    assert batch["step"] == 2 and "trajectories" not in batch["groups"][1]


def accounted(state: Any) -> int:
    ahead = state["ahead"]
    return sum(ahead["settled"].values()) + sum(len(batch["groups"]) for batch in ahead["batches"])


def test_quarantined_prompts_are_replaced_and_counted() -> None:
    lost = {ORDER[2], ORDER[9]}
    with Run(ScriptedEngines(lost=lost)).going() as run:
        run.train()
        state = run.state()
    assert state["ahead"]["settled"] == {"trained": 24, "dropped": 0, "quarantined": 2}
    assert sorted([*run.ids, *lost]) == sorted(ORDER[:26])
    assert sum(batch.metrics["rollout/quarantined"] for batch in run.trained) == 2


def test_a_prompt_that_is_nowhere_ends_the_run() -> None:
    class Forgets(PromptSampler):
        def take(self, count: int) -> list[Prompt]:
            return super().take(count + 1)[1:]

    with Run(prompts=Forgets(PROMPTS, seed=0)).going() as run:
        named = rf"10 prompts were consumed, but 4 trained .* \+ 4 in open batches = 8; open: \['{ORDER[6]}'"
        with pytest.raises(AccountingError, match=named):
            run.train()


def test_what_ends_the_engines_ends_whoever_waits() -> None:
    for ahead in (0, 1):
        engines = BrokenEngines(stuck=[(1, 1)])
        with (
            Run(engines, max_staleness=ahead).going() as run,
            pytest.raises(RuntimeError, match="all engines are gone"),
        ):
            run.train()
        assert engines.in_flight == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_that_loses_every_prompt_ends(ahead: int) -> None:
    lost = ScriptedEngines(lost={prompt.id for prompt in PROMPTS})
    gone = pytest.raises(TooManyQuarantined, match="prompts drawn in a row are all quarantined")
    with Run(lost, max_staleness=ahead, max_quarantined=99).going() as run, gone:
        run.train(until=2)


def test_a_group_that_is_late_is_sampled_again_with_the_same_seeds() -> None:
    with Run(ScriptedEngines(stuck=[(1, 1)]), max_staleness=0, group_timeout_s=0.1).going() as run:
        batch = run.train(until=1).trained[0]
    again = [task for task in run.engines.tasks if task.prompt.id == ORDER[1]]
    assert len(again) == 2 and again[0] == again[1] and run.engines.cancelled == 1
    assert run.ids == ORDER[:4] and batch.metrics["rollout/group_retries"] == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_a_batch_that_draws_more_than_it_needs_is_complete_without_the_late_ones(seed: int) -> None:
    stuck = [(1, 2), (3, 0), (3, 5)]
    with Run(ScriptedEngines(seed, stuck=stuck), oversample=2).going() as run:
        run.train()
        state = run.state()
    assert state["ahead"]["settled"] == {"trained": 24, "dropped": 12, "quarantined": 0} and run.prompts.taken == 36
    assert all(len(batch.trained) == 4 and batch.metrics["rollout/late_groups"] >= 0 for batch in run.trained)
    assert sum(batch.metrics["rollout/late_groups"] for batch in run.trained) == 12
    drawn = [ORDER[6 * step : 6 * step + 6] for step in range(STEPS)]
    for step, batch in enumerate(run.trained):
        ids = [group.prompt.id for group in batch.trained]
        assert ids == [prompt for prompt in drawn[step] if prompt in ids]  # in their order
        assert not {drawn[step][place] for at, place in stuck if at == step + 1} & set(ids)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"oversample": 2}, {}),
        ({"oversample": 2}, {"uniform_groups": "drop"}),
        ({"oversample": 2}, {"uniform_groups": "refill"}),
        ({}, {"oversample": 2}),
        ({"uniform_groups": "refill"}, {"uniform_groups": "keep"}),
        ({"uniform_groups": "refill"}, {"uniform_groups": "drop"}),
    ],
)
def test_a_batch_that_was_drawn_by_other_settings_has_the_size_that_is_set_now(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    stuck = [(3, place) for place in range(3)] if "uniform_groups" not in before else []
    with Run(ScriptedEngines(stuck=stuck), **before).going() as run:
        run.train(until=2)
        while not stuck and not all(opened.done for opened in run.source._open):
            time.sleep(0.01)
        state = run.state()
    with Run(done=2, state=state, **after).going() as resumed:
        resumed.train()
        assert accounted(resumed.state()) == resumed.prompts.taken
    sizes = [len(batch.trained) for batch in resumed.trained]
    assert sizes == [4] * 4 if after.get("uniform_groups", "keep") == "keep" else max(sizes) <= 4


def test_other_settings_cannot_take_over_what_was_sampled_ahead() -> None:
    with Run(ScriptedEngines(stuck=[(2, 1)])).going() as run:
        run.train(until=1)
        state = run.state()
    with pytest.raises(ValueError, match=r"samples_per_prompt \[4, 2\], this run has \[4, 3\]"):
        Run(samples_per_prompt=3, state=state)
    with pytest.raises(ValueError, match="sampled ahead for 2 batches, and this run samples none"):
        Run(max_staleness=0, state=state)
