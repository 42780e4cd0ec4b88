"""Evaluations in training: what they measure, what they keep, and what they say when they are cut short."""

from __future__ import annotations

import time

import pytest

from ctpo_megatron.base.stop import Stop
from ctpo_megatron.config import EvalConfig
from ctpo_megatron.engines import Sampling
from ctpo_megatron.rollouts import Evaluated, Evaluation, ReplayError
from tests.rollouts.scripted import ScriptedGenerator, Stops
from tests.rollouts.test_source import PROMPTS, Run


class Held:
    """An evaluation of two prompts over a recording."""

    def __init__(self, stop: Stop | None = None, prompts: int = 2) -> None:
        self.run = Run(stop)
        parts = (self.run.engines, self.run.scorer, PROMPTS[:prompts], stop or Stops(), self.run.phases)
        self.evaluation = Evaluation(EvalConfig(samples=2), *parts)


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
    engines, run = ScriptedGenerator(), Run()
    config = EvalConfig(samples=2, temperature=0.7, top_p=0.8)
    Evaluation(config, engines, run.scorer, PROMPTS[:2], Stops(), run.phases).run(1)
    assert [request.sampling for request in engines.requests] == [Sampling(0.7, 0.8, 0)] * 2


def test_an_evaluation_that_is_cancelled_says_that_it_is_missing() -> None:
    evaluated = Held(Stops(True)).evaluation.run(1)
    assert (evaluated.metrics, evaluated.groups) == ({}, [])
    assert evaluated.missing == "2 of 2 groups were not sampled"
    assert Held(prompts=0).evaluation.run(1) == Evaluated(1)


def test_an_evaluation_behind_the_training_finds_the_same() -> None:
    alone, held = Held().evaluation.run(1), Held()
    with held.evaluation as evaluation:
        assert evaluation.end() is None
        evaluation.begin(1)
        evaluated = evaluation.end()
    assert evaluated is not None and evaluated.metrics.pop("time/eval_behind") > 0
    assert evaluated == alone and held.run.phases.names == ["eval"]


def test_what_ends_an_evaluation_behind_the_training_ends_whoever_waits_for_it() -> None:
    held = Held(prompts=1)  # the recording has two
    held.evaluation.begin(1)
    with pytest.raises(ReplayError, match="prompts x 2"):
        held.evaluation.end()


def test_an_evaluation_ends_with_the_run() -> None:
    engines, run = ScriptedGenerator(), Run()
    engines.on_hold = True
    evaluation = Evaluation(EvalConfig(samples=2), engines, run.scorer, PROMPTS[:2], Stops(), run.phases)
    with evaluation:
        evaluation.begin(1)
        deadline = time.monotonic() + 10
        while not engines.pending and time.monotonic() < deadline:
            time.sleep(0.001)
    evaluated = evaluation.end()
    assert evaluated is not None and evaluated.missing == "2 of 2 groups were not sampled" and not engines.pending


def test_an_evaluation_counts_the_prompts_that_were_left_out() -> None:
    engines, run = ScriptedGenerator(lost=["p0", "p1"]), Run()
    evaluation = Evaluation(EvalConfig(samples=2), engines, run.scorer, PROMPTS[:2], Stops(), run.phases)
    assert evaluation.run(1).metrics == {"val/prompts_left_out": 2.0}
