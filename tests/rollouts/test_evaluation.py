"""Evaluations in training: what they measure, what they keep, and what they say when they are cut short."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ctpo_megatron.config import EvalConfig
from ctpo_megatron.data import Group
from ctpo_megatron.engines import Sampling
from ctpo_megatron.rollouts import Evaluation, ReplayError
from tests.rollouts.test_source import PROMPTS, Run


class Held:
    """An evaluation of two prompts over a recording, with what it was told to keep and to say."""

    def __init__(self, stop: Callable[[], bool] = lambda: False, prompts: int = 2, **settings: Any) -> None:
        self.run, self.kept, self.notes = Run(stop), list[tuple[int, Sequence[Group]]](), list[str]()
        keep = lambda step, groups: self.kept.append((step, groups))  # noqa: E731
        config = EvalConfig(samples=2, **settings)
        parts = (keep, self.run.phase, self.notes.append, stop)
        self.evaluation = Evaluation(config, self.run.collector, PROMPTS[:prompts], *parts)


def test_an_evaluation_scores_its_prompts_and_keeps_the_answers() -> None:
    held = Held()
    metrics = held.evaluation.run(1)
    assert {name: value for name, value in metrics.items() if "/acc/" in name} == {
        "val/test/acc/mean@2": 0.5,
        "val/test/acc/best@2": 1.0,
    }
    assert (metrics["val/test/response_length_mean"], metrics["val/test/truncated"]) == (2.0, 0.0)
    assert (metrics["val/test/tool_use"], metrics["val/test/tool_calls"]) == (0.0, 0.0)
    assert [(step, [group.prompt.id for group in groups]) for step, groups in held.kept] == [(1, ["p0", "p1"])]
    assert held.run.phases == ["eval"] and held.notes == []
    assert held.evaluation.lacks({"step": 1, "reward/mean": 1.0}) and not held.evaluation.lacks(metrics)


def test_an_evaluation_samples_as_configured() -> None:
    held, asked = Held(temperature=0.7, top_p=0.8), list[Sampling]()
    play = held.run.engines.generate

    def generate(*arguments: Any, sampling: Sampling, **settings: Any) -> list[Group]:
        asked.append(sampling)
        return play(*arguments, sampling=sampling, **settings)

    held.run.engines.generate = generate  # type: ignore[method-assign]
    held.evaluation.run(1)
    assert asked == [Sampling(0.7, 0.8, 0)]


def test_an_evaluation_that_is_cancelled_says_that_it_is_missing() -> None:
    held = Held(lambda: True)
    assert held.evaluation.run(1) == {} and held.kept == []
    [note] = held.notes
    assert note.startswith("[eval] step 1: MISSING")
    assert Held(prompts=0).evaluation.run(1) == {}


def test_an_evaluation_behind_the_training_finds_the_same() -> None:
    alone, held = Held().evaluation.run(1), Held()
    with held.evaluation as evaluation:
        evaluation.begin(1)
        step, metrics = evaluation.end()
    assert metrics.pop("time/eval_behind") > 0 and (step, metrics) == (1, alone)
    assert [step for step, _ in held.kept] == [1] and held.run.phases == ["eval"]


def test_what_ends_an_evaluation_behind_the_training_ends_whoever_waits_for_it() -> None:
    held = Held(prompts=1)  # the recording has two
    held.evaluation.begin(1)
    with pytest.raises(ReplayError, match="prompts x 2"):
        held.evaluation.end()


def test_an_evaluation_ends_with_the_run() -> None:
    held, asked = Held(), threading.Event()
    play = held.run.engines.generate

    def generate(*arguments: Any, cancelled: Callable[[], bool], **settings: Any) -> list[Group]:
        asked.set()
        while not cancelled():
            time.sleep(0.001)
        return play(*arguments, cancelled=cancelled, **settings)

    held.run.engines.generate = generate  # type: ignore[method-assign]
    with held.evaluation as evaluation:
        evaluation.begin(1)
        assert asked.wait(10)
    assert evaluation.end() == (1, {}) and held.notes[0].startswith("[eval] step 1: MISSING")


def test_an_evaluation_counts_the_prompts_that_were_left_out() -> None:
    held = Held()
    held.run.engines.generate = lambda *_, **__: []  # type: ignore[method-assign] # every group failed too often
    assert held.evaluation.run(1) == {"val/prompts_left_out": 2.0}
