"""Evaluations in training: what they measure, what they keep, and what they say when they are cut short."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ctpo_megatron.base.stop import Stop
from ctpo_megatron.config import EvalConfig
from ctpo_megatron.data import PromptSampler
from ctpo_megatron.engines import Sampling
from ctpo_megatron.rollouts import Evaluated, Evaluation, EventLoop, GroupSampler, Rollouts, RolloutSettings
from tests.rollouts.scripted import ScriptedEngines, Stops
from tests.rollouts.test_source import CONFIG, PROMPTS, Run


class Held:
    """An evaluation of two prompts over a recording."""

    def __init__(self, stop: Stop | None = None, prompts: int = 2) -> None:
        self.run = Run(stop)
        self.evaluation = evaluation(self.run.engines, self.run, prompts, stop)


def evaluation(engines: Any, run: Run, prompts: int = 2, stop: Stop | None = None, **settings: Any) -> Evaluation:
    parts = (run.scorer, PROMPTS[:prompts], stop or Stops(), run.phases)
    config = EvalConfig(samples=2, **settings)
    return Evaluation(config, EventLoop(), GroupSampler(engines, CONFIG), *parts)


def test_an_evaluation_scores_its_prompts_and_keeps_the_answers() -> None:
    held = Held()
    evaluated = held.evaluation.run(1)
    metrics = evaluated.metrics
    assert {name: value for name, value in metrics.items() if "/acc/" in name} == {
        "val/test/acc/mean@2": 0.5,
        "val/test/acc/best@2": 1.0,
    }
    assert (metrics["val/test/response_length_mean"], metrics["val/test/truncated"]) == (2.0, 0.0)
    assert (metrics["val/test/tool_use"], metrics["val/test/tool_calls"]) == (0.0, 0.0)
    assert (evaluated.step, [group.prompt.id for group in evaluated.groups]) == (1, ["p0", "p1"])
    assert held.run.phases.names == ["eval"] and evaluated.missing == ""
    assert held.evaluation.lacks({"step": 1, "reward/mean": 1.0}) and not held.evaluation.lacks(metrics)


def test_an_evaluation_samples_as_configured() -> None:
    engines, run = ScriptedEngines(), Run()
    evaluation(engines, run, temperature=0.7, top_p=0.8).run(1)
    assert [task.sampling for task in engines.tasks] == [Sampling(0.7, 0.8, 0)] * 2


def test_an_evaluation_that_is_cancelled_says_that_it_is_missing() -> None:
    evaluated = Held(Stops(True)).evaluation.run(1)
    assert (evaluated.metrics, evaluated.groups) == ({}, [])
    assert evaluated.missing == "2 of 2 groups were not sampled"
    assert Held(prompts=0).evaluation.run(1) == Evaluated(1)


def test_an_evaluation_behind_the_training_finds_the_same() -> None:
    alone, held = Held().evaluation.run(1), Held()
    with held.evaluation as behind:
        assert behind.end() is None
        behind.begin(1)
        evaluated = behind.end()
    assert evaluated is not None and evaluated.metrics.pop("time/eval_behind") > 0
    assert evaluated == alone and held.run.phases.names == ["eval"]


def test_what_ends_an_evaluation_behind_the_training_ends_whoever_waits_for_it() -> None:
    class Broken(ScriptedEngines):
        async def changed(self) -> None:
            raise RuntimeError("all engines are gone")

    broken = evaluation(Broken(stuck=[(1, 0)]), Run())
    broken.begin(1)
    with pytest.raises(RuntimeError, match="all engines are gone"):
        broken.end()


def test_an_evaluation_ends_with_the_run() -> None:
    engines = ScriptedEngines(stuck=[(1, 0)])
    with evaluation(engines, Run()) as behind:
        behind.begin(1)
        deadline = time.monotonic() + 10
        while (len(engines.begun) < 2 or engines.in_flight > 1) and time.monotonic() < deadline:
            time.sleep(0.001)
    assert engines.in_flight == 0 and engines.cancelled == 1
    evaluated = behind.end()
    assert evaluated is not None and evaluated.missing == "1 of 2 groups were not sampled"


def test_an_evaluation_does_not_wait_for_training_that_is_sampled_ahead() -> None:
    """It begins, whatever the step, though the places of training are taken."""
    engines, run = ScriptedEngines(stuck=[(1, place) for place in range(60)]), Run()
    config = CONFIG.model_copy(update={"max_staleness": 1, "prompts_per_step": 60})
    loop, sampler = EventLoop(), GroupSampler(engines, config)
    parts = (run.scorer, PROMPTS[:2], Stops(), run.phases)
    settings, prompts = RolloutSettings(config, 3), PromptSampler(PROMPTS, 0)
    with Rollouts(settings, loop, sampler, run.scorer, prompts, Stops(), run.phases) as source:
        source.publish(None, 1)  # type: ignore[arg-type]
        assert len(Evaluation(EvalConfig(samples=2), loop, sampler, *parts).run(9).groups) == 2
        assert engines.in_flight > 0


def test_an_evaluation_counts_the_prompts_that_were_left_out() -> None:
    engines, run = ScriptedEngines(lost=["p0", "p1"]), Run()
    assert evaluation(engines, run).run(1).metrics == {"val/prompts_left_out": 2.0}
