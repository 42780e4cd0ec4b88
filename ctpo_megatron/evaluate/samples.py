"""Scored answers to held-out prompts, and the figures of many: means, best of j, majority, confidence intervals."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.data.records import Prompt, ToolStatus
from ctpo_megatron.data.trajectory import FinishReason, Trajectory

RESAMPLES, LEVEL = 10_000, 0.95
_CHUNK = 500
"""Resamples drawn at once, which bounds the memory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What an evaluation keeps of a trajectory: no tokens.

    index: which of the prompt's samples. score: of the reward function; None without a verdict. response_tokens: after
    the prompt, tool output included; model_tokens: tokens written by the model. calls: status of each tool call.
    final_text: of the final turn. text: of the whole response, tool output included, without special tokens; "" unless
    requested.
    """

    prompt_id: str
    source: str
    index: int
    score: float | None
    finish_reason: FinishReason
    response_tokens: int
    model_tokens: int
    turns: int
    calls: tuple[ToolStatus, ...]
    final_text: str = ""
    text: str = ""

    @classmethod
    def of(cls, prompt: Prompt, trajectory: Trajectory, text: str = "") -> Sample:
        """Of a trajectory that is complete and scored. Raises ValueError for any other."""
        judged = trajectory.reward is not None or trajectory.no_verdict is not None
        if not judged or trajectory.finish_reason is None:
            raise ValueError(f"prompt {prompt.id} sample {trajectory.sample_index} is not finished and scored")
        return cls(
            prompt_id=prompt.id,
            source=prompt.data_source,
            index=trajectory.sample_index,
            score=trajectory.reward,
            finish_reason=trajectory.finish_reason,
            response_tokens=trajectory.response_tokens,
            model_tokens=trajectory.model_tokens,
            turns=trajectory.turns,
            calls=tuple(call.status for call in trajectory.tool_calls),
            final_text=trajectory.final_text,
            text=text,
        )


def accuracies(scores: Sequence[float | None], answers: Sequence[str | None] | None = None) -> dict[str, float]:
    """Figures of one problem with k samples: avg@k, best@k, worst@k, pass@j for all j; with `answers` maj@k.

    A score of None is no verdict and no wrong answer: the figures are over the other samples, and pass@j takes no more
    than were judged. Empty without any verdict.
    """
    k, judged = len(scores), [score for score in scores if score is not None]
    if not judged:
        return {}
    figures = {f"avg@{k}": statistics.fmean(judged), f"best@{k}": max(judged), f"worst@{k}": min(judged)}
    if answers is not None:
        votes = [answer for score, answer in zip(scores, answers, strict=True) if score is not None]
        figures[f"maj@{k}"] = majority(judged, votes)
    return figures | {f"pass@{draws}": expected_best(judged, min(draws, len(judged))) for draws in range(1, k + 1)}


def response_statistics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how the model answered: the definitions of `rollout_metrics`, without their prefix `rollout/`."""
    n, calls = len(samples), [status for sample in samples for status in sample.calls]
    figures = {
        "response_length_mean": sum(sample.response_tokens for sample in samples) / n,
        "model_tokens_mean": sum(sample.model_tokens for sample in samples) / n,
        "turns_mean": sum(sample.turns for sample in samples) / n,
        "tool_use": sum("success" in sample.calls for sample in samples) / n,
        "tool_calls": len(calls) / n,
        "truncated": sum(sample.finish_reason == "length" for sample in samples) / n,
        "max_turns": sum(sample.finish_reason == "max_turns" for sample in samples) / n,
    }
    return figures | ({"tool_error_rate": 1.0 - calls.count("success") / len(calls)} if calls else {})


def unjudged(samples: Iterable[Sample]) -> int:
    """Return how many samples have no verdict."""
    return sum(sample.score is None for sample in samples)


def by_source(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of each data source, sources in alphabetical order."""
    return dict(sorted(_split(samples, lambda sample: sample.source).items()))


def by_problem(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Return the samples of each prompt, in the order of their index."""
    problems = _split(samples, lambda sample: sample.prompt_id).values()
    return [sorted(problem, key=lambda sample: sample.index) for problem in problems]


def _split(samples: Iterable[Sample], key: Callable[[Sample], str]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[key(sample)].append(sample)
    return found


def expected_best(scores: Sequence[float], draws: int) -> float:
    """Mean of the largest score over all subsets of `draws` of the scores.

    For c ones among k scores of 0 or 1 it is 1 - C(k - c, draws) / C(k, draws), the unbiased estimate of pass@draws
    (Chen et al. 2021, arXiv 2107.03374). Raises ValueError unless 1 <= draws <= len(scores).
    """
    if not 1 <= draws <= len(scores):
        raise ValueError(f"{draws} draws of {len(scores)} scores")
    # With i scores below it, a score is the largest of C(i, draws - 1) subsets: a share of draws / k for the largest of
    # all, and from one to the next lower i smaller by (i - draws + 1) / i.
    below = np.arange(len(scores) - 1, draws - 1, -1)
    shares = draws / len(scores) * np.cumprod([1.0, *((below - draws + 1) / below)])
    return float(shares @ np.sort(scores)[::-1][: len(shares)])


def majority(scores: Sequence[float], answers: Sequence[str | None]) -> float:
    """Score of the answer that was given most often; None is no vote.

    Of equally frequent answers it is the mean, as if one was drawn. An answer that has several scores has their mean.
    Without any vote it is 0.
    """
    votes: dict[str, list[float]] = defaultdict(list)
    for score, answer in zip(scores, answers, strict=True):
        if answer is not None:
            votes[answer].append(score)
    most = max(map(len, votes.values()), default=0)
    winners = [sum(cast) / len(cast) for cast in votes.values() if len(cast) == most]
    return sum(winners) / len(winners) if winners else 0.0


def bootstrap(values: NDArray[Any], seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ends of the 95 % percentile interval of each column's mean when rows (problems) are resampled.

    values: float [rows, columns]; returns two arrays float [columns]. The same seed gives the same ends.
    """
    rows = len(values)
    generator, means = np.random.default_rng(seed), []
    for done in range(0, RESAMPLES, _CHUNK):
        size = min(_CHUNK, RESAMPLES - done)
        means.append(generator.multinomial(rows, np.full(rows, 1 / rows), size=size) @ values / rows)
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail], axis=0)
    return low, high
