"""Every sequence of a small random tree, under two policies: expectations are sums. Bias and variance of ratios."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

RATIOS = {"token": "token", "cumprod": "CTPO, prefix", "sequence-geomean": "GSPO", "sequence": "sequence"}
"""`objective.ratio_mode` -> what the tables call it."""


@dataclass(frozen=True)
class Paths:
    """Sequences of N rows: the node (prefix) in which each token is drawn, and the token; both `[N, H]`."""

    nodes: IntArray
    tokens: IntArray


@dataclass(frozen=True)
class Tree:
    """A behaviour policy that samples and a target policy that is trained, over H tokens of a vocabulary of V.

    behaviour, target: log-probabilities of the next token in each prefix, nats, `[nodes, V]`. horizon: H.
    Nodes are prefixes shorter than H, breadth first: the child of node n by token v is V n + 1 + v.
    """

    behaviour: FloatArray
    target: FloatArray
    horizon: int

    @classmethod
    def of_logits(cls, behaviour: FloatArray, target: FloatArray, horizon: int) -> Tree:
        """From logits `[nodes, V]`."""
        return cls(log_softmax(behaviour), log_softmax(target), horizon)

    @classmethod
    def random(cls, rng: np.random.Generator, vocabulary: int, horizon: int, shift: float) -> Tree:
        """Logits of the behaviour policy N(0, 1), and of the target policy these plus `shift` times N(0, 1)."""
        shape = (nodes_above(horizon, vocabulary), vocabulary)
        behaviour = rng.standard_normal(shape)
        return cls.of_logits(behaviour, behaviour + shift * rng.standard_normal(shape), horizon)

    @classmethod
    def independent(cls, behaviour: FloatArray, target: FloatArray) -> Tree:
        """From log-probabilities of the token at each position, `[H, V]`, whatever the prefix."""
        horizon, vocabulary = behaviour.shape
        position = np.repeat(np.arange(horizon), vocabulary ** np.arange(horizon))
        return cls(behaviour[position], target[position], horizon)

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self.behaviour.shape[1])

    @cached_property
    def paths(self) -> Paths:
        """All V^H sequences."""
        tokens = np.indices((self.vocabulary,) * self.horizon).reshape(self.horizon, -1).T
        return self._along(tokens.astype(np.int64))

    @cached_property
    def probability(self) -> FloatArray:
        """Of each of `paths` under the behaviour policy, `[N]`."""
        return self._probability(self.behaviour)

    @cached_property
    def target_probability(self) -> FloatArray:
        """Of each of `paths` under the target policy, `[N]`."""
        return self._probability(self.target)

    def sample(self, rng: np.random.Generator, count: int) -> Paths:
        """Sequences that the behaviour policy draws, token by token."""
        cumulative = np.exp(self.behaviour).cumsum(1)[:, :-1]  # without the last: a sum of 1 - 1e-16 names no token
        node, tokens = np.zeros(count, np.int64), []
        for _ in range(self.horizon):
            tokens.append((rng.random(count)[:, None] >= cumulative[node]).sum(1))
            node = self.vocabulary * node + 1 + tokens[-1]
        return self._along(np.stack(tokens, 1))

    def log_ratios(self, ratio: str, paths: Paths | None = None) -> FloatArray:
        """log r_t of a `ratio_mode`, target over behaviour, `[N, H]`; of all sequences by default."""
        paths = paths or self.paths
        d = (self.target - self.behaviour)[paths.nodes, paths.tokens]
        if ratio == "token":
            return d
        prefix = d.cumsum(1)
        if ratio == "cumprod":
            return prefix
        whole = np.repeat(prefix[:, -1:], self.horizon, 1)
        return {"sequence": whole, "sequence-geomean": whole / self.horizon}[ratio]

    def prefix_advantages(self, rng: np.random.Generator) -> FloatArray:
        """A(s_t, a_t), known with token t: N(0, 1) for each node and token, `[N, H]`."""
        return rng.standard_normal(self.behaviour.shape)[self.paths.nodes, self.paths.tokens]

    def outcome_advantages(self, rng: np.random.Generator) -> FloatArray:
        """Return one reward for the whole sequence, N(0, 1), the same for all of its tokens, `[N, H]`."""
        return np.repeat(rng.standard_normal(len(self.probability))[:, None], self.horizon, 1)

    def true_gradient(self, advantages: FloatArray) -> FloatArray:
        """E_target[sum_t A_t grad log target(a_t | s_t)] in the logits of the target policy, `[nodes, V]`."""
        return self._gradient(self.target_probability[:, None] * advantages)

    def expected_gradient(self, ratio: str, advantages: FloatArray) -> FloatArray:
        """E_behaviour[sum_t r_t A_t grad log target(a_t | s_t)] of a `ratio_mode`, unclipped, `[nodes, V]`."""
        return self.sampled_gradient(np.exp(self.log_ratios(ratio)) * advantages)

    def sampled_gradient(self, weights: FloatArray) -> FloatArray:
        """E_behaviour[sum_t w_t grad log target(a_t | s_t)] of weights `[N, H]`, `[nodes, V]`."""
        return self._gradient(self.probability[:, None] * weights)

    def trace_variance(self, weights: FloatArray, *, of_target: bool = False) -> float:
        """Trace of the covariance of sum_t w_t grad log target(a_t | s_t), for a sequence of the behaviour policy.

        of_target: for one of the target policy.
        """
        probability = self.target_probability if of_target else self.probability
        likely = np.exp(self.target)
        square = ((likely**2).sum(1)[:, None] + 1 - 2 * likely)[self.paths.nodes, self.paths.tokens]
        mean = self._gradient(probability[:, None] * weights)
        return float(probability @ (weights**2 * square).sum(1) - (mean**2).sum())

    def bias_by_position(self, ratio: str, advantages: FloatArray) -> FloatArray:
        """Norm of the bias of the gradient's term t over the norm of the true term, `[H]`.

        Term t is the gradient in the logits of the nodes of depth t, as log target(a_t | s_t) has no others.
        """
        true, got = self.true_gradient(advantages), self.expected_gradient(ratio, advantages)
        ends = [nodes_above(depth, self.vocabulary) for depth in range(1, self.horizon)]
        terms = zip(np.split(got, ends), np.split(true, ends), strict=True)
        return np.array([relative_bias(term, true_term) for term, true_term in terms])

    def bias(self, ratio: str, advantages: FloatArray) -> float:
        """Return the same of the whole gradient."""
        return relative_bias(self.expected_gradient(ratio, advantages), self.true_gradient(advantages))

    def _along(self, tokens: IntArray) -> Paths:
        nodes = np.zeros_like(tokens)
        for t in range(1, self.horizon):
            nodes[:, t] = self.vocabulary * nodes[:, t - 1] + 1 + tokens[:, t - 1]
        return Paths(nodes, tokens)

    def _probability(self, log_probs: FloatArray) -> FloatArray:
        return np.asarray(np.exp(log_probs[self.paths.nodes, self.paths.tokens].sum(1)))

    def _gradient(self, weights: FloatArray) -> FloatArray:
        """sum of weights times grad log target(a_t | s_t) = onehot(a_t) - target(. | s_t)."""
        logit = self.paths.nodes * self.vocabulary + self.paths.tokens
        taken = np.bincount(logit.ravel(), weights.ravel(), self.target.size).reshape(self.target.shape)
        return np.asarray(taken - taken.sum(1, keepdims=True) * np.exp(self.target))


def nodes_above(depth: int, vocabulary: int) -> int:
    """Prefixes shorter than `depth`."""
    return sum(vocabulary**length for length in range(depth))


def log_softmax(logits: FloatArray) -> FloatArray:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def relative_bias(got: FloatArray, true: FloatArray) -> float:
    """Norm of the difference over the norm of what is true."""
    return float(np.linalg.norm(got - true) / np.linalg.norm(true))


def variances(tree: Tree, ratio: str) -> FloatArray:
    """Var r_t of a `ratio_mode` under the behaviour policy, exact, `[H]`."""
    r = np.exp(tree.log_ratios(ratio))
    mean = tree.probability @ r
    return np.asarray(tree.probability @ (r - mean) ** 2)


def second_moments(tree: Tree, ratio: str) -> FloatArray:
    """E r_t^2 under the behaviour policy, exact, `[H]`."""
    return np.asarray(tree.probability @ np.exp(2 * tree.log_ratios(ratio)))


def suffix_share(tree: Tree) -> FloatArray:
    """E[rho_{1:t}^2 Var(rho_{t+1:H} | s_{t+1})], `[H]`.

    Var(rho_{1:H}) - Var(rho_{1:t}) is exactly this, and so never negative: proposition 2 (i). The conditional second
    moments come from the leaves up, M(s) = sum_a target(a | s)^2 / behaviour(a | s) M(s, a), and not from sequences.
    """
    moment = np.ones(len(tree.behaviour) + tree.vocabulary**tree.horizon)
    weight = np.exp(2 * tree.target - tree.behaviour)
    for node in reversed(range(len(tree.behaviour))):
        child = tree.vocabulary * node + 1
        moment[node] = weight[node] @ moment[child : child + tree.vocabulary]
    after = tree.vocabulary * tree.paths.nodes + 1 + tree.paths.tokens
    return np.asarray(tree.probability @ (np.exp(2 * tree.log_ratios("cumprod")) * (moment[after] - 1)))


def chi_squared(behaviour: FloatArray, target: FloatArray) -> FloatArray:
    """chi^2 of the target against the behaviour policy, from log-probabilities `[..., V]`: the variance of a factor."""
    return np.asarray(np.exp(2 * target - behaviour).sum(-1) - 1)


def independent_variances(chi2: FloatArray) -> FloatArray:
    """Var rho_{1:t} = prod_{k <= t} (1 + chi2_k) - 1 of independent factors, `[H]`: proposition 2 (ii)."""
    return np.asarray(np.expm1(np.log1p(chi2).cumsum()))


def equal_factors(vocabulary: int, horizon: int, chi2: float) -> Tree:
    """Independent positions of equal chi^2: the behaviour policy is uniform, the target policy rises linearly.

    chi2: below 1/3, so that every probability is positive for any vocabulary.
    """
    slope = np.arange(vocabulary) - (vocabulary - 1) / 2
    slope /= np.sqrt((slope**2).mean())
    uniform = np.full((horizon, vocabulary), -np.log(vocabulary))
    return Tree.independent(uniform, uniform + np.log1p(np.sqrt(chi2) * slope))


def sampled_variances(tree: Tree, paths: Paths) -> tuple[FloatArray, FloatArray]:
    """Var rho_{1:t} of sampled sequences, and its standard error, both `[H]`. E rho = 1 is known."""
    squares = (np.exp(tree.log_ratios("cumprod", paths)) - 1) ** 2
    return squares.mean(0), squares.std(0, ddof=1) / np.sqrt(len(squares))


_FIRST, _SECOND = (0, 1), (2, 1)
"""Node and token of the logits: of a_1 = 1, and of a_2 = 1 after a_1 = 1."""


@dataclass(frozen=True)
class Counterexample:
    """Two binary actions and the reward a_1 a_2.

    p, q: probability of a_1 = 1, and of a_2 = 1, under the target policy; p_b, q_b: under the behaviour policy.
    """

    p: float = 0.6
    q: float = 0.8
    p_b: float = 0.5
    q_b: float = 0.4

    def formulas(self) -> dict[str, tuple[float, float]]:
        """Gradient of E[a_1 a_2] in the logits of a_1, and of a_2 after a_1 = 1: the true one, and CTPO's."""
        first, second = self.p * (1 - self.p), self.p * self.q * (1 - self.q)
        return {"true": (first * self.q, second), "cumprod": (first * self.q_b, second)}

    def enumerated(self) -> dict[str, tuple[float, float]]:
        """Return the same from all four sequences, and the other ratios."""
        tree = Tree.independent(_log_probs(self.p_b, self.q_b), _log_probs(self.p, self.q))
        reward = tree.paths.tokens.prod(1, keepdims=True) * np.ones(tree.horizon)
        gradients = {"true": tree.true_gradient(reward)}
        gradients |= {ratio: tree.expected_gradient(ratio, reward) for ratio in RATIOS}
        return {name: (float(gradient[_FIRST]), float(gradient[_SECOND])) for name, gradient in gradients.items()}


def _log_probs(*of_one: float) -> FloatArray:
    return np.array([[np.log1p(-p), np.log(p)] for p in of_one])
