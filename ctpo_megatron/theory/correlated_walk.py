"""Walks whose increments are correlated, so that Var(S_t) is not the sum of their variances."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from ctpo_megatron.theory.tree import FloatArray, IntArray


@dataclass(frozen=True)
class CorrelatedWalk(ABC):
    """sigma: nats. Positions t ascend, `[P]`."""

    sigma: float

    @abstractmethod
    def variances(self, t: IntArray) -> FloatArray:
        """sum_{k <= t} Var(d_k), exact, `[P]`."""

    @abstractmethod
    def covariances(self, t: IntArray) -> FloatArray:
        """2 sum_{j < k <= t} Cov(d_j, d_k), exact, `[P]`: what Var(S_t) has in addition."""

    @abstractmethod
    def sample(self, rng: np.random.Generator, count: int, t: IntArray) -> FloatArray:
        """S_t of simulated walks, `[count, P]`."""


@dataclass(frozen=True)
class Autoregressive(CorrelatedWalk):
    """d_k ~ N(0, sigma^2), with the correlation phi^h at distance h.

    An illustration: tokens that the denominator of the ratio has sampled cannot do this, as E[exp d_k | prefix] = 1.
    """

    phi: float = 0.3

    def variances(self, t: IntArray) -> FloatArray:
        return np.asarray(t * self.sigma**2)

    def covariances(self, t: IntArray) -> FloatArray:
        found = [2 * float((np.arange(n - 1, 0, -1) * self.phi ** np.arange(1, n)).sum()) for n in t.tolist()]
        return self.sigma**2 * np.array(found)

    def sample(self, rng: np.random.Generator, count: int, t: IntArray) -> FloatArray:
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
class UnequalTrajectories(CorrelatedWalk):
    """Every trajectory has a variance of its own, sigma^2 times Exp(1), and with it a drift: d ~ N(-s^2 / 2, s^2).

    E[exp d | prefix] = 1 holds. The drifts differ, so Cov(d_j, d_k) = Var(s^2) / 4 = sigma^4 / 4 at any distance, and
    Var(S_t) grows like t^2 in the end.
    """

    def variances(self, t: IntArray) -> FloatArray:
        return np.asarray(t * (self.sigma**2 + self.sigma**4 / 4))

    def covariances(self, t: IntArray) -> FloatArray:
        return t * (t - 1.0) * self.sigma**4 / 4

    def sample(self, rng: np.random.Generator, count: int, t: IntArray) -> FloatArray:
        variance = self.sigma**2 * rng.exponential(size=(count, 1))
        steps = np.diff(t, prepend=0)
        gained = np.sqrt(variance * steps) * rng.standard_normal((count, len(t))) - variance * steps / 2
        return gained.cumsum(1)
