"""log r_t = S_t as a random walk: spread, drift, and what a clip window cuts; correlated increments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ctpo_megatron.config import PolicyObjective
from theory_tree import BoolArray, FloatArray, IntArray, log_softmax

_AT_ONCE = 4_000_000
"""Increments in memory, 32 MB."""


@dataclass(frozen=True)
class Window:
    """Bounds of log r_t, nats: low t^power and high t^power."""

    name: str
    low: float
    high: float
    power: float

    def bounds(self, t: FloatArray | IntArray) -> tuple[FloatArray, FloatArray]:
        """At positions t."""
        scale = np.asarray(t, np.float64) ** self.power
        return self.low * scale, self.high * scale

    def reached_by_drift(self, sigma: float) -> float:
        """Position at which the drift -t sigma^2 / 2 alone is at the lower bound."""
        return float((-2 * self.low / sigma**2) ** (1 / (1 - self.power)))


def windows() -> tuple[Window, Window]:
    """Return the paper's widening window, and the fixed one that it compares with: presets of the objective."""
    widening, fixed = PolicyObjective.preset("ctpo"), PolicyObjective.preset("ctpo-fixed")
    return (
        Window("widening", -widening.clip_low, widening.clip_high, widening.clip_power),
        Window("fixed", math.log(1 - fixed.clip_low), math.log(1 + fixed.clip_high), 0.0),
    )


def drift(t: FloatArray | IntArray, sigma: float) -> FloatArray:
    """E S_t = -t sigma^2 / 2: E exp d = 1 for d normal, as the behaviour policy draws from what it reports."""
    return -np.asarray(t, np.float64) * sigma**2 / 2


def clip_rate(window: Window, t: FloatArray | IntArray, std: FloatArray, mean: FloatArray | float) -> FloatArray:
    """Share of tokens that a window cuts, `[P]`, where S_t is normal and half of the advantages are positive.

    1/2 [Phi((low - mean) / std) + 1 - Phi((high - mean) / std)]: below `low` where A < 0, above `high` where A > 0.
    """
    phi = np.vectorize(NormalDist().cdf, otypes=[np.float64])
    low, high = window.bounds(t)
    return np.asarray((phi((low - mean) / std) + phi((mean - high) / std)) / 2)


def clipped_share(window: Window, t: IntArray, walks: FloatArray, positive: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Return the share over walks, and its standard error. walks: S_t, `[N, P]`; positive: whether A > 0, `[N]`."""
    low, high = window.bounds(t)
    share = np.where(positive[:, None], walks > high, walks < low).mean(0)
    return share, np.sqrt(share * (1 - share) / len(walks))


def normal_walks(rng: np.random.Generator, count: int, t: IntArray, sigma: float) -> FloatArray:
    """S_t at positions t (ascending) of walks of independent increments N(0, sigma^2), without drift: `[count, P]`."""
    length = int(t[-1])
    rows = max(1, _AT_ONCE // length)
    parts = []
    for start in range(0, count, rows):
        steps = rng.standard_normal((min(rows, count - start), length))
        parts.append(sigma * steps.cumsum(1, out=steps)[:, t - 1])
    return np.concatenate(parts)


@dataclass(frozen=True)
class TokenPairs:
    """Next-token distributions of which each position takes one at random. Log-probabilities `[pairs, V]`.

    E exp d = 1 exactly in each of them, so that their walks have the drift without it being put in.
    """

    behaviour: FloatArray
    target: FloatArray

    @classmethod
    def random(cls, rng: np.random.Generator, sigma: float, pairs: int = 4, vocabulary: int = 4) -> TokenPairs:
        """Random logits, moved so far that the standard deviation of d is `sigma` nats."""
        behaviour, direction = rng.standard_normal((2, pairs, vocabulary))

        def moved(size: float) -> TokenPairs:
            return cls(log_softmax(behaviour), log_softmax(behaviour + size * direction))

        low, high = 0.0, 100.0
        for _ in range(60):  # bisection to the precision of float64
            middle = (low + high) / 2
            low, high = (middle, high) if moved(middle).moments()[1] < sigma else (low, middle)
        return moved(high)

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of d under the behaviour policy, nats."""
        probability, d = np.exp(self.behaviour) / len(self.behaviour), self.target - self.behaviour
        mean = float((probability * d).sum())
        return mean, math.sqrt(float((probability * (d - mean) ** 2).sum()))

    def walks(self, rng: np.random.Generator, count: int, t: IntArray) -> FloatArray:
        """S_t at positions t (ascending) of sampled tokens, `[count, P]`.

        How often each token came between two positions is multinomial: what tokens drawn one by one would give.
        """
        probability = (np.exp(self.behaviour) / len(self.behaviour)).ravel()
        d = (self.target - self.behaviour).ravel()
        gained = [rng.multinomial(steps, probability / probability.sum(), count) @ d for steps in np.diff(t, prepend=0)]
        return np.stack(gained, 1).cumsum(1)


@dataclass(frozen=True)
class Autoregressive:
    """d_k ~ N(0, sigma^2), with the correlation phi^h at distance h.

    An illustration: tokens that the denominator of the ratio has sampled cannot do this, as E[exp d_k | prefix] = 1.
    sigma: nats. Positions t ascend, `[P]`.
    """

    sigma: float
    phi: float = 0.3

    def variances(self, t: IntArray) -> FloatArray:
        """sum_{k <= t} Var(d_k), exact, `[P]`."""
        return np.asarray(t * self.sigma**2)

    def covariances(self, t: IntArray) -> FloatArray:
        """2 sum_{j < k <= t} Cov(d_j, d_k), exact, `[P]`: what Var(S_t) has in addition."""
        sums = [2 * float((np.arange(n - 1, 0, -1) * self.phi ** np.arange(1, n)).sum()) for n in t.tolist()]
        return self.sigma**2 * np.array(sums)

    def sample(self, rng: np.random.Generator, count: int, t: IntArray) -> FloatArray:
        """S_t of simulated walks, `[count, P]`."""
        wanted, kept = set(t.tolist()), []
        step, total = self.sigma * rng.standard_normal(count), np.zeros(count)
        fresh = self.sigma * math.sqrt(1 - self.phi**2)
        for position in range(1, int(t[-1]) + 1):
            total = total + step
            if position in wanted:
                kept.append(total)
            step = self.phi * step + fresh * rng.standard_normal(count)
        return np.stack(kept, 1)


@dataclass(frozen=True)
class UnequalTrajectories:
    """Every trajectory has a variance of its own, sigma^2 times Exp(1), and with it a drift: d ~ N(-s^2 / 2, s^2).

    E[exp d | prefix] = 1 holds. The drifts differ, so Cov(d_j, d_k) = Var(s^2) / 4 = sigma^4 / 4 at any distance, and
    Var(S_t) grows like t^2 in the end. Methods as of `Autoregressive`.
    """

    sigma: float

    def variances(self, t: IntArray) -> FloatArray:
        return np.asarray(t * (self.sigma**2 + self.sigma**4 / 4))

    def covariances(self, t: IntArray) -> FloatArray:
        return t * (t - 1.0) * self.sigma**4 / 4

    def sample(self, rng: np.random.Generator, count: int, t: IntArray) -> FloatArray:
        variance = self.sigma**2 * rng.exponential(size=(count, 1))
        steps = np.diff(t, prepend=0)
        gained = np.sqrt(variance * steps) * rng.standard_normal((count, len(t))) - variance * steps / 2
        return gained.cumsum(1)


CURVE: IntArray = np.unique([*np.geomspace(1, 8_000, 25).round().astype(np.int64), 100, 1_000])
"""Positions at which walks are kept: even on a log axis, and the positions of the tables."""
NO_DRIFT, DRIFT, TOKENS = "no drift", "drift", "sampled tokens"
Walks = dict[str, tuple[FloatArray, FloatArray | float]]


def simulated(rng: np.random.Generator, samples: int, sigma: float) -> Walks:
    """Kind of increments -> S_t `[samples, P]` at the positions of `CURVE`, and the mean that the formulas take."""
    normal, mean = normal_walks(rng, samples, CURVE, sigma), drift(CURVE, sigma)
    tokens = TokenPairs.random(rng, sigma).walks(rng, samples, CURVE)
    return {NO_DRIFT: (normal, 0.0), DRIFT: (normal + mean, mean), TOKENS: (tokens, mean)}
