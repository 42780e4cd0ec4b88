"""Evaluations in training: what they measure, what they keep, and what they say when they are cut short."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from ctpo_megatron.base.stop import Stop
from ctpo_megatron.config import EvalConfig, RolloutConfig
from ctpo_megatron.data import Prompt, PromptSampler
from ctpo_megatron.engines import Sampling
from ctpo_megatron.rollouts import Evaluated, Evaluation, EventLoop, GroupSampler, Rollouts
from ctpo_megatron.tracking import Phases
from tests.rollouts.scripted import BrokenEngines, RecordedPhases, ScriptedEngines, ScriptedScorer, Stops

CONFIG = RolloutConfig(prompts_per_step=2, samples_per_prompt=2)
PROMPTS = [Prompt(f"p{n}", "test", (), str(n), (1, 2, n + 3)) for n in range(10)]


def evaluation(
    engines: ScriptedEngines | None = None,
    prompts: Sequence[Prompt] = PROMPTS[:2],
    stop: Stop | None = None,
    phases: Phases | None = None,
    scorer: Any = None,
    **settings: Any,
) -> Evaluation:
    """Of two samples of each prompt."""
    parts = (scorer or ScriptedScorer(), prompts, stop or Stops(), phases or Phases())
    sampler: Any = GroupSampler(engines or ScriptedEngines(), CONFIG)
    return Evaluation(EvalConfig(**{"samples": 2} | settings), EventLoop(), sampler, *parts)


def test_an_evaluation_scores_its_prompts_and_keeps_the_answers() -> None:
    phases = RecordedPhases()
    held = evaluation(phases=phases)
    evaluated = held.run(1)
    metrics = evaluated.metrics
    assert accuracies(metrics) == {"val/test/acc/mean@2": 0.5, "val/test/acc/best@2": 1.0}
    assert (metrics["val/test/response_length_mean"], metrics["val/test/truncated"]) == (2.0, 0.0)
    assert (metrics["val/test/tool_use"], metrics["val/test/tool_calls"]) == (0.0, 0.0)
    assert (evaluated.step, [group.prompt.id for group in evaluated.groups]) == (1, ["p0", "p1"])
    assert phases.names == ["eval"] and phases.advanced == 2 and evaluated.missing == ""
    assert held.lacks({"step": 1, "reward/mean": 1.0}) and not held.lacks(metrics)


def evaluated(*answers: tuple[str, list[float | None]]) -> dict[str, float]:
    """`val/*` of prompts by their data source, each with these rewards."""
    prompts = [Prompt(f"p{n}", source, (), "", (1,)) for n, (source, _) in enumerate(answers)]
    scorer: Any = ScriptedScorer(lambda prompt, sample: answers[int(prompt[1:])][1][sample])
    return evaluation(prompts=prompts, scorer=scorer, samples=len(answers[0][1])).run(1).metrics


def accuracies(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "/acc/" in name}


def test_accuracies_are_per_source_and_best_needs_several_samples() -> None:
    one = evaluated(("b", [1]), ("a", [1]), ("a", [0]))
    assert accuracies(one) == {"val/a/acc/mean@1": 0.5, "val/b/acc/mean@1": 1.0}
    assert [one[f"val/{source}/problems"] for source in "ab"] == [2, 1]
    two = evaluated(("a", [1, 0]), ("a", [0, 0]))
    assert accuracies(two) == {"val/a/acc/mean@2": 0.25, "val/a/acc/best@2": 0.5}
    assert two["val/a/response_length_mean"] == 2.0 and "val/a/tool_error_rate" not in two


def test_an_answer_without_a_verdict_is_no_wrong_answer() -> None:
    metrics = evaluated(("a", [1, None]), ("a", [None, None]), ("a", [0, 1]))
    assert accuracies(metrics) == {"val/a/acc/mean@2": 0.75, "val/a/acc/best@2": 1.0}
    assert (metrics["val/a/no_verdict"], metrics["val/a/problems"]) == (0.5, 2)
    nothing = evaluated(("a", [None]), ("b", [1]))
    assert accuracies(nothing) == {"val/b/acc/mean@1": 1.0}
    assert nothing["val/a/no_verdict"] == 1.0 and "val/b/no_verdict" not in nothing


def test_an_evaluation_samples_as_configured() -> None:
    engines = ScriptedEngines()
    evaluation(engines, temperature=0.7, top_p=0.8).run(1)
    assert [task.sampling for task in engines.tasks] == [Sampling(0.7, 0.8, 0)] * 2


def test_an_evaluation_that_is_cancelled_says_that_it_is_missing() -> None:
    evaluated = evaluation(stop=Stops(True)).run(1)
    assert (evaluated.metrics, evaluated.groups) == ({}, [])
    assert evaluated.missing == "2 of 2 groups were not sampled"
    assert evaluation(prompts=[]).run(1) == Evaluated(1)


def test_an_evaluation_behind_the_training_finds_the_same() -> None:
    phases = RecordedPhases()
    alone = evaluation().run(1)
    with evaluation(phases=phases) as behind:
        assert behind.end() is None
        behind.begin(1)
        evaluated = behind.end()
    assert evaluated is not None and evaluated.metrics.pop("time/eval_behind") > 0
    assert evaluated == alone and phases.names == ["eval"]


def test_what_ends_an_evaluation_behind_the_training_ends_whoever_waits_for_it() -> None:
    broken = evaluation(BrokenEngines(stuck=[(1, 0)]))
    broken.begin(1)
    with pytest.raises(RuntimeError, match="all engines are gone"):
        broken.end()


def test_an_evaluation_ends_with_the_run() -> None:
    engines = ScriptedEngines(stuck=[(1, 0)])
    with evaluation(engines) as behind:
        behind.begin(1)
        deadline = time.monotonic() + 10
        while (len(engines.begun) < 2 or engines.in_flight > 1) and time.monotonic() < deadline:
            time.sleep(0.001)
    assert engines.in_flight == 0 and engines.cancelled == 1
    evaluated = behind.end()
    assert evaluated is not None and evaluated.missing == "1 of 2 groups were not sampled"


def test_an_evaluation_does_not_wait_for_training_that_is_sampled_ahead() -> None:
    """It begins, whatever the step, though the places of training are taken."""
    engines, scorer = ScriptedEngines(stuck=[(1, place) for place in range(60)]), ScriptedScorer()
    config = CONFIG.model_copy(update={"max_staleness": 1, "prompts_per_step": 60})
    shared: Any = EventLoop(), GroupSampler(engines, config), scorer
    with Rollouts(config, *shared, PromptSampler(PROMPTS, 0), Stops(), Phases(), steps=3) as source:
        source.publish(None, 1)  # type: ignore[arg-type]
        assert len(Evaluation(EvalConfig(samples=2), *shared, PROMPTS[:2], Stops(), Phases()).run(9).groups) == 2
        assert engines.in_flight > 0


def test_an_evaluation_counts_the_prompts_that_were_left_out() -> None:
    assert evaluation(ScriptedEngines(lost=["p0", "p1"])).run(1).metrics == {"val/prompts_left_out": 2.0}
