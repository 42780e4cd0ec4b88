"""What several answers to each problem say of a model: best of j draws, majority, and how sure a mean is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES, LEVEL = 10_000, 0.95
_CHUNK = 500
"""Resamples drawn at once, which bounds the memory."""


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
