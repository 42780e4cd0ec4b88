"""results.json: the figures of an evaluation by data source and over all problems, with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ctpo_answers import answer_part, last_boxed, reference_answer, votes
from ctpo_megatron.evaluate.samples import (
    LEVEL,
    RESAMPLES,
    Sample,
    accuracies,
    bootstrap,
    by_problem,
    by_source,
    response_statistics,
    unjudged,
)

RESULTS_FILE = "results.json"
REFERENCE_SCORER = "reference"
_RIGHT = "\0right"


@dataclass(frozen=True)
class ScoreColumn:
    """A column of the results. scores: of every sample, by prompt id and index; None without a verdict."""

    name: str
    scores: Mapping[tuple[str, int], float | None]

    def judges(self, samples: Iterable[Sample]) -> bool:
        """Return whether any of the samples has a verdict."""
        return any(self.scores[sample.prompt_id, sample.index] is not None for sample in samples)

    def problem(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Figures of one problem; see `accuracies`."""
        scores = [self.scores[sample.prompt_id, sample.index] for sample in samples]
        return accuracies(scores, self.answers(samples, scores))

    def answers(self, samples: Sequence[Sample], scores: Sequence[float | None]) -> list[str | None]:
        """Return the answer that each sample of one problem votes for; None without an answer.

        All correct answers count as one, since the scorer found each equal to the ground truth. Others are the same
        answer if they say the same (`votes`).
        """
        shown = [written_answer(sample, self.name) for sample in samples]
        wrong = [text for text, score in zip(shown, scores, strict=True) if score != 1.0 and text is not None]
        voted = iter(votes(wrong))
        return [
            _RIGHT if score == 1.0 else None if text is None else next(voted)
            for text, score in zip(shown, scores, strict=True)
        ]


def written_answer(sample: Sample, scorer: str) -> str | None:
    """Return the answer as written in the sample: its last box, or, where no box is needed, the answer read from the
    text.
    """
    if scorer == REFERENCE_SCORER:
        return reference_answer(sample.text)
    box = last_boxed(answer_part(sample.final_text))
    return box if box is not None or scorer == "strict" else sample.final_text.strip() or None


def results(samples: Sequence[Sample], scorers: Sequence[ScoreColumn], seed: int) -> dict[str, Any]:
    """`overall` and `sources`, each {problems, samples, <statistic>..., <scorer>: {<figure>: {value, low, high}}}.

    `response_statistics` has the statistics; `no_verdict` counts samples without one, if any. samples: of problems that
    every scorer judges (`ScoreColumn.judges`).
    """
    sources = {source: _figures(of_source, scorers, seed) for source, of_source in by_source(samples).items()}
    return {
        "overall": _figures(samples, scorers, seed),
        "sources": sources,
        "intervals": {"level": LEVEL, "resamples": RESAMPLES, "seed": seed},
    }


def _figures(samples: Sequence[Sample], scorers: Sequence[ScoreColumn], seed: int) -> dict[str, Any]:
    problems = by_problem(samples)
    columns = {by.name: _with_intervals([by.problem(problem) for problem in problems], seed) for by in scorers}
    missing = {"no_verdict": count} if (count := unjudged(samples)) else {}
    return {"problems": len(problems), "samples": len(samples), **missing, **response_statistics(samples), **columns}


def _with_intervals(problems: Sequence[Mapping[str, float]], seed: int) -> dict[str, dict[str, float]]:
    """Mean of every figure over the problems, and the ends of its interval."""
    names = list(problems[0])
    values = np.array([[problem[name] for name in names] for problem in problems])
    columns = zip(names, values.mean(axis=0), *bootstrap(values, seed), strict=True)
    return {name: {"value": float(v), "low": float(low), "high": float(high)} for name, v, low, high in columns}
