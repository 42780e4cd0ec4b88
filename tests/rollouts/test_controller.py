"""Sampling ahead, with engines that follow a script: order, pacing, updates in flight, accounting, resuming."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data import Batch, Group, Prompt, PromptSampler, Trajectory
from ctpo_megatron.engines.tasks import Deliver, FleetError, Request
from ctpo_megatron.rollouts import AsyncRollouts, Collector, Quarantined, SampledRollouts
from ctpo_megatron.rollouts.ledger import AccountingError
from ctpo_megatron.rollouts.metrics import fleet_stats
from tests.rollouts.scored import Scored

PROMPTS = [Prompt(f"p{n}", "test", (), str(n), (1, 2, n + 3)) for n in range(50)]
ORDER = [prompt.id for prompt in PromptSampler(PROMPTS, seed=0).take(200)]
STEPS = 6


class Engines:
    """Plays made-up episodes a few groups a turn, in an order of its own.

    Of each trajectory one token is sampled when it begins and one when it ends. lost: prompts that always fail. stuck:
    places that do not end until they are taken out of it.
    """

    def __init__(self, seed: int = 0, lost: Iterable[str] = (), stuck: Iterable[tuple[int, int]] = ()) -> None:
        self.lock = threading.RLock()
        self.version = 0
        self.quarantined: list[Quarantined] = []
        self.begun: dict[Hashable, int] = {}  # place -> version
        self.lost, self.stuck = set(lost), set(stuck)
        self.rng = random.Random(seed)
        self.in_update = 0
        self.on_hold = False
        self.counts: Counter[str] = Counter()
        self._waiting: list[tuple[Hashable, Prompt, Request]] = []
        self._playing: dict[Hashable, tuple[Prompt, Request, int]] = {}

    def dispatcher(self) -> Engines:
        return self

    def begin_sync(self, named_tensors: Any, version: int) -> None:
        self.in_update = self.in_flight
        self.version = version

    def stats(self) -> dict[str, float]:
        return fleet_stats({})

    def admit(self, place: Hashable, prompt: Prompt, request: Request) -> None:
        while prompt.id in self.lost:
            if prompt.id not in {record.prompt_id for record in self.quarantined}:
                self.quarantined.append(Quarantined(prompt.id, request.step, "made up"))
                self.counts["quarantined"] += 1
            assert request.replacement is not None
            prompt = request.replacement()
        self._waiting.append((place, prompt, request))

    def dispatch(self) -> None:
        while self._waiting and not self.on_hold:
            place, prompt, request = self._waiting.pop(0)
            self.begun[place] = self.version
            self._playing[place] = (prompt, request, self.version)

    def turn(self, deliver: Deliver, longest_s: float) -> None:
        with self.lock:
            self.dispatch()
            able = [place for place in self._playing if place not in self.stuck]
            for place in self.rng.sample(able, min(3, len(able))):
                prompt, request, version = self._playing.pop(place)
                deliver(place, Group(prompt, [self._play(prompt, n, version) for n in range(request.samples)]))
        time.sleep(0.0005)

    def _play(self, prompt: Prompt, sample: int, began: int) -> Trajectory:
        result = Trajectory(prompt.id, sample, seed=sample, finish_reason="answer")
        result.append_context(prompt.token_ids, turn=0)
        result.append_model([7, 8 + sample], [-0.5, -0.25], [began, self.version], turn=1)
        return result

    @property
    def playing(self) -> dict[Hashable, Prompt]:
        waiting = {place: prompt for place, prompt, _ in self._waiting}
        return waiting | {place: prompt for place, (prompt, _, _) in self._playing.items()}

    @property
    def in_flight(self) -> int:
        return len(self._playing)

    def give_up(self, places: Collection[Hashable]) -> None:
        self._waiting = [job for job in self._waiting if job[0] not in places]
        self._playing = {place: job for place, job in self._playing.items() if place not in places}

    def cancel(self) -> None:
        with self.lock:
            self.give_up(self.playing)


class Scorer:
    """Two different rewards for two prompts of three, else none."""

    def begin(self, groups: Sequence[Group]) -> Scored:
        return Scored(groups, lambda prompt_id, sample: float(sample) if int(prompt_id[1:]) % 3 else 0.0)

    def metrics(self, groups: Sequence[Group], reports: Sequence[int]) -> dict[str, float]:
        assert len(groups) == sum(reports)
        return {"reward/mean": 0.5}

    def report_record(self, report: int) -> int:
        return report

    report_of = report_record


class Run:
    """What `train.py` does with a source, without the training."""

    def __init__(
        self,
        engines: Engines | None = None,
        *,
        steps: int = STEPS,
        cancelled: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> None:
        self.engines = engines or Engines()
        config = RolloutConfig(
            **{"prompts_per_step": 4, "samples_per_prompt": 2, "max_staleness": 1, "group_timeout_s": 20} | settings
        )
        self.prompts = PromptSampler(PROMPTS, seed=0)
        self.source = AsyncRollouts(
            config,
            self.engines,
            Scorer(),
            self.prompts,
            cancelled,
            steps=steps,
            mini_batch_prompts=2,
        )
        self.done, self.steps = 0, steps
        self.trained: list[Batch] = []

    @contextmanager
    def going(self) -> Iterator[Run]:
        """It samples, with the weights of the steps done."""
        with self.source:
            self.publish()
            yield self

    def publish(self) -> None:
        with self.source.updating(self.done + 1):
            self.source.publish([], self.done + 1)

    def train(self, until: int | None = None) -> Run:
        while self.done < (until or self.steps):
            batch = self.source.next_batch(self.done + 1)
            assert batch is not None
            self.trained.append(batch)
            self.done += 1
            self.publish()
        return self

    def state(self) -> Any:
        return json.loads(json.dumps(self.source.state_dict()))

    @property
    def ids(self) -> list[str]:
        """Of all prompts trained on or dropped, in the order of sampling."""
        return [group.prompt.id for batch in self.trained for group in batch.sampled]


def lags(run: Run) -> dict[int, set[int]]:
    """Step -> how many versions its tokens are behind."""
    found = {}
    for step, batch in enumerate(run.trained, start=1):
        versions = {v for t in batch.trajectories for v in t.weight_version if v >= 0}
        assert batch.weight_versions == tuple(sorted(versions))
        found[step] = {step - version for version in versions}
    return found


@pytest.mark.parametrize("partial", ["continue", "finish"])
@pytest.mark.parametrize("ahead", [1, 2])
def test_batches_come_in_prompt_order_and_are_at_most_so_stale(ahead: int, partial: str) -> None:
    for seed in range(3):
        with Run(Engines(seed), max_staleness=ahead, partial=partial).going() as run:
            run.train()
        assert run.ids == ORDER[: 4 * STEPS]
        assert all(min(lag) >= 0 and max(lag) <= ahead for lag in lags(run).values())
        assert all(run.engines.begun[step, place] >= max(1, step - ahead) for step in range(1, 7) for place in range(4))
        assert run.prompts.taken == 4 * STEPS  # nothing is sampled that no step trains on


def test_a_batch_is_the_one_of_the_synchronous_order_when_nothing_is_stale() -> None:
    class Prompted(Engines):
        def generate(
            self, prompts: Sequence[Prompt], *, samples: int, each: Callable[[Group], None], **_: Any
        ) -> list[Group]:
            groups = [Group(prompt, [self._play(prompt, n, 1) for n in range(samples)]) for prompt in prompts]
            for group in groups:
                each(group)
            return groups

    engines = Prompted()
    engines.version = 1
    config = RolloutConfig(prompts_per_step=4, samples_per_prompt=2)
    collector = Collector(engines, Scorer(), lambda: False)
    sampler = PromptSampler(PROMPTS, seed=0)
    source = SampledRollouts(config, collector, engines, sampler, lambda _: nullcontext(), mini_batch_prompts=2)
    expected = source.next_batch(1)
    assert expected is not None
    with Run().going() as run:
        batch = run.train(until=1).trained[0]
    assert batch.groups == expected.groups and batch.weight_versions == expected.weight_versions == (1,)
    stale = {name for name in batch.metrics if "stale" in name or name == "rollout/continued_tokens"}
    assert {name: batch.metrics[name] for name in stale} == dict.fromkeys(stale, 0.0) and len(stale) == 4
    assert set(batch.metrics) - stale == set(expected.metrics)


def test_the_next_batch_is_begun_while_stragglers_are_in_flight() -> None:
    with Run(Engines(stuck=[(1, 2)])).going() as run:
        deadline = time.monotonic() + 10
        while run.engines.in_flight > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert {step for step, _ in run.engines.begun} == {1, 2} and run.engines.in_flight == 1
        run.engines.stuck.clear()
        run.train()


def test_an_update_finds_in_flight_what_goes_on_with_it() -> None:
    with Run(Engines(stuck=[(2, 1)])).going() as run:
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
    with Run(Engines(stuck=[(2, 1)]), partial="finish").going() as run:
        timer = threading.Timer(0.2, run.engines.stuck.clear)
        timer.start()
        run.train()
        timer.join()
    assert run.engines.in_update == 0
    assert all(len(set(t.weight_version[3:])) == 1 for batch in run.trained for t in batch.trajectories)
    assert {max(lag) for lag in lags(run).values()} == {0, 1}


@pytest.mark.parametrize("partial", ["continue", "finish"])
def test_a_run_that_is_asked_to_end_does_not_wait_for_stragglers(partial: str) -> None:
    asked: list[bool] = []
    with Run(Engines(stuck=[(2, 1)]), partial=partial, cancelled=lambda: bool(asked)).going() as run:
        assert run.source.next_batch(1) is not None
        run.done = 1
        asked.append(True)
        began = time.monotonic()
        run.publish()
        assert run.source.next_batch(2) is None
        state = run.state()
        assert time.monotonic() < began + 5
    [batch, *_] = state["ahead"]["batches"]
    assert batch["step"] == 2 and "trajectories" not in batch["groups"][1]


def accounted(state: Any) -> int:
    ahead = state["ahead"]
    return sum(ahead["settled"].values()) + sum(len(batch["groups"]) for batch in ahead["batches"])


@pytest.mark.parametrize("uniform", ["keep", "drop", "refill"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_run_goes_on_with_every_prompt_accounted_for(seed: int, uniform: str) -> None:
    rng = random.Random(seed)
    lost = {ORDER[rng.randrange(30)] for _ in range(3)}
    settings = {"uniform_groups": uniform, "max_staleness": 2}
    done, state, trained, settled = 0, None, list[Batch](), list[str]()
    while done < STEPS:
        engines = Engines(rng.random(), lost, stuck=[(done + 2, rng.randrange(4))])
        run = Run(engines, **settings)
        run.done = done
        if state is not None:
            run.source.load_state_dict(state)
            kept = {
                (batch["step"], group["prompt"]): [t["token_ids"] for t in group["trajectories"]]
                for batch in state["ahead"]["batches"]
                for group in batch["groups"]
                if "trajectories" in group
            }
        with run.going():
            run.train(until=done + 1)
            if done:
                mine = {(done + 1, g.prompt.id): [t.token_ids for t in g.trajectories] for g in run.trained[0].sampled}
                assert all(mine[key] == tokens for key, tokens in kept.items() if key[0] == done + 1)
            state = run.state()
            if done + 1 < STEPS:
                run.engines.stuck.clear()
                run.train(until=done + 2)  # which the kill undoes
        trained.append(run.trained[0])
        done += 1
        assert accounted(state) == state["prompts"]["epoch"] * len(PROMPTS) + state["prompts"]["cursor"]
    settled = [group.prompt.id for batch in trained for group in batch.sampled]
    gone = {record["prompt_id"] for record in state["quarantined"]}
    consumed = state["prompts"]["consumed"] if state["prompts"]["epoch"] == 0 else ORDER[:50]
    assert not state["ahead"]["batches"] and gone == lost & set(consumed)
    if state["prompts"]["epoch"] == 0:
        assert sorted(settled + list(gone)) == sorted(consumed)
    if uniform == "keep":  # each lost one is replaced by the next prompt at the time
        assert len(settled) == 4 * STEPS


def test_quarantined_prompts_are_replaced_and_counted() -> None:
    lost = {ORDER[2], ORDER[9]}
    with Run(Engines(lost=lost)).going() as run:
        run.train()
        state = run.state()
    assert state["ahead"]["settled"] == {"trained": 24, "dropped": 0, "quarantined": 2}
    assert sorted([*run.ids, *lost]) == sorted(ORDER[:26])
    assert sum(batch.metrics["rollout/quarantined"] for batch in run.trained) == 2


def test_a_prompt_that_is_nowhere_ends_the_run() -> None:
    with Run(Engines(stuck=[(2, 0)])).going() as run:
        assert run.source.next_batch(1) is not None
        with run.engines.lock:
            del run.engines._playing[2, 0]
        run.done = 1
        run.engines.begun.clear()
        with pytest.raises(AccountingError, match=rf"8 prompts were consumed, but .* = 7; missing: \['{ORDER[4]}'\]"):
            run.source._check()


def test_what_ends_the_thread_ends_whoever_waits() -> None:
    class Broken(Engines):
        def turn(self, deliver: Deliver, longest_s: float) -> None:
            raise RuntimeError("all engines are gone")

    with Run(Broken()).going() as run, pytest.raises(RuntimeError, match="all engines are gone"):
        run.train()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_batch_that_draws_more_than_it_needs_is_complete_without_the_late_ones(seed: int) -> None:
    stuck = [(1, 2), (3, 0), (3, 5)]
    with Run(Engines(seed, stuck=stuck), oversample=2).going() as run:
        run.train()
        state = run.state()
    assert state["ahead"]["settled"] == {"trained": 24, "dropped": 12, "quarantined": 0} and run.prompts.taken == 36
    assert all(len(batch.groups) == 4 and batch.metrics["rollout/late_groups"] >= 0 for batch in run.trained)
    assert sum(batch.metrics["rollout/late_groups"] for batch in run.trained) == 12
    drawn = [ORDER[6 * step : 6 * step + 6] for step in range(STEPS)]
    for step, batch in enumerate(run.trained):
        ids = [group.prompt.id for group in batch.groups]
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
    with Run(Engines(stuck=stuck), **before).going() as run:
        run.train(until=2)
        while not stuck and not all(opened.batch for opened in run.source._batches):
            time.sleep(0.01)
        state = run.state()
    resumed = Run(**after)
    resumed.done = 2
    resumed.source.load_state_dict(state)
    with resumed.going():
        resumed.train()
        assert accounted(resumed.state()) == resumed.prompts.taken
    sizes = [len(batch.groups) for batch in resumed.trained]
    assert sizes == [4] * 4 if after.get("uniform_groups", "keep") == "keep" else max(sizes) <= 4


def test_a_thread_that_stands_still_is_named() -> None:
    go_on = threading.Event()

    class Blocked(Engines):
        def turn(self, deliver: Deliver, longest_s: float) -> None:
            go_on.wait()

    with Run(Blocked(), start_timeout_s=0.1, weights={"timeout_s": 0.1}).going() as run:
        late = "step 1 waits for the thread of the rollouts, which has not ended its turn within 0.2 s; it has 8 groups"
        with pytest.raises(FleetError, match=late):
            run.train()
        go_on.set()


def test_other_settings_cannot_take_over_what_was_sampled_ahead() -> None:
    with Run(Engines(stuck=[(2, 1)])).going() as run:
        run.train(until=1)
        state = run.state()
    with pytest.raises(ValueError, match=r"samples_per_prompt \[4, 2\], this run has \[4, 3\]"):
        Run(samples_per_prompt=3).source.load_state_dict(state)
    engines = Engines()
    collector = Collector(engines, Scorer(), lambda: False)  # type: ignore[arg-type] # it plays in turns only
    sampler = PromptSampler(PROMPTS, seed=0)
    source = SampledRollouts(RolloutConfig(), collector, engines, sampler, lambda _: nullcontext())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampled ahead for 2 batches, and this run samples none"):
        source.load_state_dict(state)
