"""What the random walk of log r_t says, as tables: spread, drift, clip rates, correlated increments."""

from __future__ import annotations

import numpy as np

from ctpo_megatron.theory.correlated_walk import Autoregressive, UnequalTrajectories
from ctpo_megatron.theory.random_walk import (
    TokenPairs,
    clip_rate,
    clipped_share,
    drift,
    normal_walks,
    windows,
)
from ctpo_megatron.theory.tables import TableCell, TheoryTable
from ctpo_megatron.theory.tree import BoolArray, FloatArray, IntArray

SHOWN = (100, 1_000, 8_000)
"""Positions in the terminal."""
CURVE: IntArray = np.unique([*np.geomspace(1, SHOWN[-1], 25).round().astype(np.int64), *SHOWN])
"""Positions of the figures."""
NO_DRIFT, DRIFT, TOKENS = "no drift", "drift", "sampled tokens"
Walks = dict[str, tuple[FloatArray, FloatArray | float]]


def simulated(rng: np.random.Generator, samples: int, sigma: float) -> Walks:
    """Kind of increments -> S_t `[samples, P]` at the positions of `CURVE`, and the mean that the formulas take."""
    normal, mean = normal_walks(rng, samples, CURVE, sigma), drift(CURVE, sigma)
    tokens = TokenPairs.random(rng, sigma).walks(rng, samples, CURVE)
    return {NO_DRIFT: (normal, 0.0), DRIFT: (normal + mean, mean), TOKENS: (tokens, mean)}


def spread_table(walks: Walks, sigma: float) -> TheoryTable:
    """The sqrt(t) law, and the drift."""
    chosen = np.searchsorted(CURVE, SHOWN)
    t, normal, tokens = CURVE[chosen], walks[NO_DRIFT][0][:, chosen], walks[TOKENS][0][:, chosen]
    std = tokens.std(0, ddof=1)
    return TheoryTable.of(
        "spread",
        f"S_t of independent increments, sigma = {sigma:g}: spread and drift",
        "std(S_t) = sigma sqrt(t). Sampled tokens follow it, and drift by about -t sigma^2 / 2 with no drift put "
        "in: E exp d = 1 is enough. Errors are standard errors of the columns before them.",
        {
            "t": t,
            "sigma sqrt(t)": sigma * np.sqrt(t),
            "std, normal": normal.std(0, ddof=1),
            "std, tokens": std,
            "error of std": std / np.sqrt(2 * len(tokens)),
            "-t sigma^2/2": drift(t, sigma),
            "mean, tokens": tokens.mean(0),
            "error of mean": std / np.sqrt(len(tokens)),
        },
    )


def clip_tables(walks: Walks, positive: BoolArray, sigma: float) -> tuple[TheoryTable, TheoryTable]:
    """Clip rates at the positions shown, and at all positions of the curve. positive: whether A > 0, `[samples]`."""
    rows: list[tuple[TableCell, ...]] = []
    for window in windows():
        for kind, (walk, mean) in walks.items():
            formula = clip_rate(window, CURVE, sigma * np.sqrt(CURVE), mean)
            counted = clipped_share(window, CURVE, walk, positive)
            columns = [column.tolist() for column in (CURVE, formula, *counted)]
            rows += [(window.name, kind, *cells) for cells in zip(*columns, strict=True)]
    reached = ", ".join(f"{each.name} {each.reached_by_drift(sigma):,.0f}" for each in windows())
    title = f"Clip rate of both windows, sigma = {sigma:g}, half of the advantages positive"
    says = (
        "Without drift the widening window cuts the same share at every position, and the fixed one ever more. With "
        f"the drift both cut more as t grows: it alone is at the lower bound at t = {reached}. The formula is for "
        "normal S_t; sampled tokens have the drift by themselves, and come close to normal for large t only."
    )
    header = ("window", "increments", "t", "formula", "simulated", "standard error")
    shown = tuple(row for row in rows if row[2] in SHOWN)
    return (
        TheoryTable("clip_rates", title, says, header, shown),
        TheoryTable("clip_rate_curves", title, says, header, tuple(rows)),
    )


def correlated_table(rng: np.random.Generator, samples: int, sigma: float) -> TheoryTable:
    """Increments that are not independent: what Var(S_t) = t sigma^2 leaves out."""
    t, (widening, _) = np.array(SHOWN), windows()
    positive = rng.random(samples) < 0.5
    rows: list[tuple[TableCell, ...]] = []
    for name, increments in (("AR(1)", Autoregressive(sigma)), ("own sigma", UnequalTrajectories(sigma))):
        walk, variances = increments.sample(rng, samples, t), increments.variances(t)
        squares = (walk - walk.mean(0)) ** 2
        columns = [
            t,
            variances,
            increments.covariances(t),
            squares.mean(0) - variances,
            squares.std(0, ddof=1) / np.sqrt(samples),
            *clipped_share(widening, t, walk, positive),
        ]
        rows += [(name, *cells) for cells in zip(*(column.tolist() for column in columns), strict=True)]
    independent = float(clip_rate(widening, t[:1], sigma * np.sqrt(t[:1]), 0.0)[0])
    return TheoryTable(
        "correlated",
        f"Correlated increments, sigma = {sigma:g}: Var(S_t) = sum Var(d) + 2 sum Cov",
        "The sqrt(t) law with sigma = std(d) needs uncorrelated increments. AR(1) with correlation 0.3 is an "
        f"illustration: it keeps sqrt(t), and the widening window cuts more than the {independent:.3f} of "
        "independent increments. Where each trajectory has a sigma of its own, the drifts differ. E[exp d | prefix] "
        "= 1 then holds as well, and 2 sum Cov still grows like t^2: no sqrt(t) law. The errors are standard errors "
        "of the simulated columns before them.",
        ("increments", "t", "sum Var(d)", "2 sum Cov", "simulated", "error", "clip rate", "its error"),
        tuple(rows),
    )
