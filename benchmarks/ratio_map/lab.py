"""A laboratory that predicts a cell in about a second: a policy of tables in numpy, trained as a run would be.

A response has 32 tokens, each with six values; logits are a table by family, position and value, and families share
what they learn. Most tokens decide nothing. On `toolmath` four decide: the call, its program, a number in it, the
box. On `early-choice` one chooses a route, and a later one is right after one route alone; its logits are shared by
both routes, since a small model cannot tell them apart at first. The probabilities are those of the SFT conversations
(`examples.toolmath.settings`). Batches, groups, updates, passes, lag, windows and advantages are those of the run,
the optimizer is AdamW. Two numbers are fitted to toolmath on-policy, and to nothing else: the share of numbers
that are copied right, and the factor of rates, since a table moves less than a network at the same rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.ratio_map.cells import EVAL_EVERY, RATES, TASKS, TUNING_SEED, Cell, MapTask
from ctpo_megatron.config import PolicyObjective
from examples.toolmath import Corruption, EarlyChoice

Numbers = np.ndarray[Any, np.dtype[Any]]
FAMILIES, LENGTH, VALUES, SHARED = 14, 32, 6, 6
PROMPTS, SAMPLES, UPDATES = 32, 8, 8
RATE = 400.0
"""Rate of a table over that of the run. With it `ctpo` rises on-policy about as benchmarks/results/staleness.md has it:
in the laboratory to .51, .59, .63 and .66 at steps 4, 6, 8 and 10, there to .54, .66, .70 and .73 (seed 0)."""
LAB_SEEDS = range(10)
"""More than the map has, since they cost nothing."""
BETAS, EPS, CLIP_GRAD = (0.9, 0.95), 1e-8, 1.0
CAP, CLAMP = 10.0, 20.0
"""Largest log r, and largest step of a sum of log-ratios, as in docs/objective.md."""
COPIED = 0.75
"""Share of the numbers that the tiny model copies right after SFT: with it the reward starts at .22, as measured."""
CALL, PROGRAM, COPY, BOX = LENGTH // 8, LENGTH // 2, 5 * LENGTH // 8, 7 * LENGTH // 8
CHOICE, LATER = LENGTH // 8, 3 * LENGTH // 4


def token_weights(objective: PolicyObjective, d: Numbers, advantages: Numbers) -> tuple[Numbers, Numbers]:
    """Return the factor of each token's grad log-prob, ascending, and whether its bound acts: `[B, T]` each.

    d: log-ratio of each token to the anchor. advantages: `[B]`. Formulas of docs/objective.md.
    """
    sums, t = np.clip(d, -CLAMP, CLAMP).cumsum(1), np.arange(1, d.shape[1] + 1)
    a = advantages[:, None]
    match objective.ratio_mode:
        case "cumprod":
            log_r = sums
        case "geomean":
            log_r = sums / t
        case "token":
            log_r = np.clip(d, -CLAMP, CLAMP)
        case "sequence":
            log_r = np.repeat(sums[:, -1:], d.shape[1], 1)
        case "sequence-geomean":
            log_r = np.repeat(sums[:, -1:] / d.shape[1], d.shape[1], 1)
    r = np.exp(np.minimum(log_r, CAP))
    low, high, dual = objective.clip_low, objective.clip_high, objective.clip_c
    if objective.clip_mode == "detached_ratio":
        limited = np.clip(r, 1 - low, 1 + high)
        return a * limited, limited != r
    if objective.clip_mode == "log_power":
        x, scale, one = log_r, t**objective.clip_power, 0.0
        dual = None if dual is None or dual < 0 else dual
    elif objective.clip_mode == "ratio":
        x, scale, one = r, np.ones(1), 1.0
    else:
        raise ValueError(f"the laboratory has no clip_mode {objective.clip_mode}")
    cut = np.where(a > 0, x > one + high * scale, x < one - low * scale)
    if dual is not None and dual >= 0:
        cut |= (a < 0) & (x > dual * scale)
    cut |= log_r > CAP
    return np.where(cut, 0.0, a * r), cut


class LabTask:
    """Start logits `[F, T, V]`, the reward of samples, and the mean reward of a policy, exactly."""

    def __init__(self, task: MapTask, seed: int) -> None:
        rng = np.random.default_rng(1000 + seed)
        self.early_choice = task.source == "early_choice"
        self.logits = rng.normal(size=(FAMILIES, LENGTH, VALUES))
        self.logits[..., 0] += 4.0
        spoiled, choice = Corruption(), EarlyChoice()
        asked, boxed = 1 - spoiled.guess, (1 - spoiled.no_box) * (1 - spoiled.no_print)
        self._set(COPY, [COPIED])
        if self.early_choice:
            self.worth = choice.worth
            self._set(CHOICE, [choice.lesser, 1 - choice.lesser])
            self._set(LATER, [choice.usual * asked * boxed, (1 - choice.usual) * asked * boxed])
        else:
            self._set(CALL, [asked])
            self._set(PROGRAM, [1 - spoiled.wrong_common - spoiled.wrong_rare, spoiled.wrong_common])
            self._set(BOX, [boxed])

    def _set(self, position: int, chances: list[float]) -> None:
        """Give the first values of a position these chances, and the others what is left, alike."""
        rest = (1 - sum(chances)) / (VALUES - len(chances))
        self.logits[:, position] = np.log([*chances, *[max(rest, 1e-3)] * (VALUES - len(chances))])

    def reward(self, tokens: Numbers) -> Numbers:
        """Return the reward `[B]` of tokens `[B, T]`."""
        if self.early_choice:
            route, answer = tokens[:, CHOICE], tokens[:, LATER]
            lesser, better = (route == 0) & (answer == 0), (route == 1) & (answer == 1)
            return (self.worth * lesser + 1.0 * better) * (tokens[:, COPY] == 0)
        return 1.0 * np.all(tokens[:, [CALL, PROGRAM, COPY, BOX]] == 0, axis=1)

    def value(self, logits: Numbers) -> float:
        """Return the mean reward over families."""
        p = _softmax(logits)
        if self.early_choice:
            lesser = p[:, CHOICE, 0] * p[:, LATER, 0]
            return float(((self.worth * lesser + p[:, CHOICE, 1] * p[:, LATER, 1]) * p[:, COPY, 0]).mean())
        return float((p[:, CALL, 0] * p[:, PROGRAM, 0] * p[:, COPY, 0] * p[:, BOX, 0]).mean())


@dataclass(frozen=True)
class LabRun:
    """values: mean reward of the weights that a step begins with, and after the last. cut: share of tokens that their
    bound acts on, mean of all updates; uncertain: of positive tokens of sampler p below .5."""

    values: list[float]
    cut: float
    uncertain: float


def run(cell: Cell, rate: float, seed: int) -> LabRun:
    """Train the laboratory's policy as a run of the cell would train its model."""
    rng, task, regime = np.random.default_rng(seed), LabTask(cell.task, seed), cell.regime
    numbers, behaviour = cell.objective.numbers, regime.frozen or regime.lag > 0
    sharing = np.random.default_rng(77 + seed).normal(size=(FAMILIES, SHARED)) / np.sqrt(SHARED)
    weights, optimizer = np.zeros((SHARED, LENGTH, VALUES)), _AdamW(rate * RATE)
    logits, history, values = task.logits, [task.logits], [task.value(task.logits)]
    acted, uncertain = list[float](), list[float]()
    for step in range(regime.steps):
        sampler = history[0] if regime.frozen else history[max(0, step - regime.lag)]
        families = np.repeat(rng.integers(0, FAMILIES, PROMPTS), SAMPLES)
        tokens = (sampler[families] + rng.gumbel(size=(len(families), LENGTH, VALUES))).argmax(2)
        advantages = _advantages(task.reward(tokens))
        anchor = _log_probs(sampler if behaviour else logits, families, tokens)[0]
        sampled = np.exp(_log_probs(sampler, families, tokens)[0])
        for _ in range(regime.passes):
            for batch in np.array_split(np.arange(len(families)), UPDATES):
                log_probs, p = _log_probs(logits, families[batch], tokens[batch])
                factors, acts = token_weights(numbers, log_probs - anchor[batch], advantages[batch])
                learned = np.abs(advantages[batch]) > 0
                acted.append(float(acts[learned].mean()) if learned.any() else 0.0)
                decide = (sampled[batch] < 0.5) & (advantages[batch] > 0)[:, None]
                uncertain.append(float(acts[decide].mean()) if decide.any() else 0.0)
                gradient = _gradient(factors / (LENGTH * len(batch)), p, families[batch], tokens[batch], sharing)
                weights = optimizer.step(weights, gradient)
                logits = task.logits + np.einsum("fd,dtv->ftv", sharing, weights)
        history.append(logits)
        values.append(task.value(logits))
    return LabRun(values, float(np.mean(acted)), float(np.mean(uncertain)))


def endpoint(cell: Cell, found: LabRun) -> float:
    """Return what the map measures of a run: the mean reward of its batches, of a frozen one of its evaluations."""
    return float(np.mean(found.values[EVAL_EVERY::EVAL_EVERY] if cell.regime.frozen else found.values[:-1]))


def predict(cell: Cell) -> dict[str, Any]:
    """Return the prediction: picked rate, endpoint of each seed, and the shares of tokens that bounds act on."""
    tuned = replace(cell, task=TASKS[0])
    tried = {rate: endpoint(tuned, run(tuned, float(rate), TUNING_SEED)) for rate in RATES}
    rate = max(tried, key=lambda rate: tried[rate])
    runs = [run(cell, float(rate), seed) for seed in LAB_SEEDS]
    return {
        "rate": rate,
        "values": [round(endpoint(cell, found), 4) for found in runs],
        "cut": round(float(np.mean([found.cut for found in runs])), 4),
        "uncertain": round(float(np.mean([found.uncertain for found in runs])), 4),
    }


def _advantages(rewards: Numbers) -> Numbers:
    """As `objective.advantage.kind: group` has them."""
    groups = rewards.reshape(PROMPTS, SAMPLES)
    centred = groups - groups.mean(1, keepdims=True)
    return np.asarray((centred / (groups.std(1, ddof=1, keepdims=True) + 1e-6)).ravel())


def _softmax(logits: Numbers) -> Numbers:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _log_probs(logits: Numbers, families: Numbers, tokens: Numbers) -> tuple[Numbers, Numbers]:
    """Log-probs `[B, T]` of tokens, and all probabilities `[B, T, V]`."""
    p = _softmax(logits)[families]
    return np.log(np.take_along_axis(p, tokens[..., None], 2)[..., 0]), p


def _gradient(factors: Numbers, p: Numbers, families: Numbers, tokens: Numbers, sharing: Numbers) -> Numbers:
    """`[D, T, V]`: of sum factors x log-probs, by the shared weights."""
    of_logits = -factors[..., None] * p
    chosen = np.take_along_axis(of_logits, tokens[..., None], 2) + factors[..., None]
    np.put_along_axis(of_logits, tokens[..., None], chosen, 2)
    return np.asarray(np.tensordot(sharing[families], of_logits, (0, 0)))


class _AdamW:
    """Ascent with clipped gradients, without weight decay."""

    def __init__(self, rate: float) -> None:
        self._rate, self._steps = rate, 0
        self._first: Numbers | float = 0.0
        self._second: Numbers | float = 0.0

    def step(self, weights: Numbers, gradient: Numbers) -> Numbers:
        gradient = gradient * min(1.0, CLIP_GRAD / (float(np.sqrt((gradient**2).sum())) + 1e-6))
        self._steps += 1
        self._first = BETAS[0] * self._first + (1 - BETAS[0]) * gradient
        self._second = BETAS[1] * self._second + (1 - BETAS[1]) * gradient**2
        first = self._first / (1 - BETAS[0] ** self._steps)
        second = self._second / (1 - BETAS[1] ** self._steps)
        return np.asarray(weights + self._rate * first / (np.sqrt(second) + EPS))
