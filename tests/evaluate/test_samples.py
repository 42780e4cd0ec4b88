"""Figures of samples: accuracies of a problem, and statistics of responses as the rollout's own metrics define it."""

from __future__ import annotations

import random

import pytest

from ctpo_megatron.data.records import NoVerdict, Prompt
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.evaluate.samples import Sample, accuracies, by_problem, response_statistics
from ctpo_megatron.rollouts import rollout_metrics
from tests.tracking.synthetic_run import make_groups


def samples_of(groups: list[Group]) -> list[Sample]:
    return [Sample.of(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]


def sample(source: str, prompt: str, index: int, score: float | None) -> Sample:
    return Sample(prompt, source, index, score, "answer", 10, 8, 1, ())


def test_response_statistics_are_what_the_rollout_metrics_say() -> None:
    groups = make_groups(random.Random(0), prompts=12, samples=4, share_right=0.4)
    figures = response_statistics(samples_of(groups))
    metrics = rollout_metrics(groups)
    assert figures == pytest.approx({name: metrics[f"rollout/{name}"] for name in figures})
    assert len(figures) == 8 and 0 < figures["tool_use"] < 1


def test_accuracies_of_a_problem() -> None:
    assert accuracies([1, 0, 0, 1], ["4", "5", "5", "4"]) == pytest.approx(
        {
            "avg@4": 0.5,
            "best@4": 1,
            "worst@4": 0,
            "maj@4": 0.5,
            "pass@1": 0.5,
            "pass@2": 5 / 6,
            "pass@3": 1,
            "pass@4": 1,
        }
    )
    assert "maj@1" not in accuracies([1])


def test_samples_of_a_problem_come_in_order() -> None:
    shuffled = [sample("a", "q", 1, 0), sample("a", "p", 1, 0), sample("a", "p", 0, 1), sample("a", "q", 0, 0)]
    found = [[(s.prompt_id, s.index) for s in problem] for problem in by_problem(shuffled)]
    assert found == [[("q", 0), ("q", 1)], [("p", 0), ("p", 1)]]


def test_an_unscored_trajectory_is_no_sample() -> None:
    with pytest.raises(ValueError, match="prompt p sample 3"):
        Sample.of(Prompt("p", "a", (), "", ()), Trajectory("p", 3, 0, finish_reason="answer"))


def test_a_sample_without_a_verdict_is_no_wrong_answer() -> None:
    assert accuracies([1, None, 0, None], ["4", "5", "6", "5"]) == {
        "avg@4": 0.5,
        "best@4": 1,
        "worst@4": 0,
        "maj@4": 0.5,
        "pass@1": 0.5,
        "pass@2": 1,
        "pass@3": 1,
        "pass@4": 1,
    }
    assert accuracies([None, None], ["5", "5"]) == {}


def test_the_verdict_that_is_missing_is_kept() -> None:
    lost = Trajectory("p", 3, 0, finish_reason="answer", no_verdict=NoVerdict("timeout", "late"))
    lost.append_context([1], turn=0)
    assert Sample.of(Prompt("p", "a", (), "", ()), lost).score is None
