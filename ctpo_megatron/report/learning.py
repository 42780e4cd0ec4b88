"""Whether a run learns: warnings about its first batch, its decline, its best step, and their rows in the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctpo_megatron.base.run_paths import MARKER, RunPaths, step_name
from ctpo_megatron.report.run_data import ACCURACY, RunData, Series

REWARD = "reward/mean"
WINDOWS = (1, 5)
"""Steps at the start and at the end whose mean rewards are compared: one shows a collapse at once, five a slow fall."""
_ERRORS = 3.5
"""A fall or a gain is one of at least this many standard errors of the difference."""
_SHARE = 0.25
"""And of at least this many standard deviations of the reward of a trajectory, so that small steady losses pass."""
_FEWEST = 30
"""Held-out problems that an evaluation without their number is taken to have."""


@dataclass(frozen=True)
class Trend:
    """A quantity at the start of a run and lately. worse, better: it has changed by more than noise explains."""

    label: str
    start: float
    now: float
    worse: bool
    better: bool

    def __str__(self) -> str:
        return f"{self.label} {'fell' if self.worse else 'went'} from {self.start:.3g} to {self.now:.3g}"


@dataclass
class Decline:
    """Compares each step of a run with its start.

    groups: prompts of a step. They are taken as the number of independent rewards, as the samples of a prompt may
    all be alike. The standard error of an accuracy follows from its number of problems.
    """

    groups: int
    _rewards: list[float] = field(default_factory=list)
    _spread: float = 0.0
    _accuracies: dict[str, list[float]] = field(default_factory=dict)
    _problems: dict[str, float] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def add(self, record: Mapping[str, Any]) -> list[str]:
        """Take the metrics of a step, of an evaluation or both. Returns a text for each quantity that has fallen far
        for the first time."""
        if (reward := record.get(REWARD)) is not None:
            self._rewards.append(reward)
            self._spread = max(self._spread, record.get("reward/std") or 0.0)
        for name, value in record.items():
            if value is not None and (match := ACCURACY.fullmatch(name)):
                self._accuracies.setdefault(name, []).append(value)
                problems = record.get(f"val/{match['source']}/problems")
                self._problems[name] = problems or self._problems.get(name, _FEWEST)
        fallen = {name: str(trend) for name, trend in self.trends().items() if trend.worse}
        new = [text for name, text in fallen.items() if name not in self._said]
        self._said |= fallen.keys()
        return new

    def trends(self) -> dict[str, Trend]:
        """Of the reward and of each accuracy with two values at least, by metric."""
        found = {}
        if len(self._rewards) >= 2:
            found[REWARD] = self._reward()
        for name, values in self._accuracies.items():
            if len(values) >= 2 and (match := ACCURACY.fullmatch(name)):
                pooled = min(1.0, max(0.0, (values[0] + values[-1]) / 2))
                spread = math.sqrt(pooled * (1 - pooled))
                label, count = f"accuracy on {match['source']}", self._problems[name]
                found[name] = _trend(label, values[0], values[-1], spread, count)
        return found

    def _reward(self) -> Trend:
        """Over the longest window that shows a fall, else over the longest that fits."""
        fitting = [window for window in WINDOWS if len(self._rewards) >= 2 * window]
        trends = []
        for window in reversed(fitting):
            start, now = (sum(part) / window for part in (self._rewards[:window], self._rewards[-window:]))
            trends.append(_trend("sampled reward", start, now, self._spread, self.groups * window))
        return next((trend for trend in trends if trend.worse), trends[0])


def decline_of(records: Iterable[Mapping[str, Any]], groups: int) -> Decline:
    """Of steps in their order; see `Decline`."""
    decline = Decline(groups)
    for record in records:
        decline.add(record)
    return decline


def _trend(label: str, start: float, now: float, spread: float, count: float) -> Trend:
    """start, now: means of `count` independent values each, of standard deviation `spread`."""
    least = max(_ERRORS * spread * math.sqrt(2 / count), _SHARE * spread, math.ulp(abs(start)))
    return Trend(label, start, now, worse=start - now >= least, better=now - start >= least)


@dataclass(frozen=True)
class Best:
    """value: of `measure`, the largest of the run, of equal ones the latest. last: of the last step that has it.

    checkpoint: complete, of that step; None where it was not saved or not kept.
    """

    step: int
    measure: str
    value: float
    last: float
    checkpoint: Path | None

    @property
    def where(self) -> str:
        """The checkpoint, or how the next run keeps it."""
        if self.checkpoint is not None:
            return str(self.checkpoint)
        return "its checkpoint is not there; checkpoint.keep_best: 1 keeps the best by checkpoint.best_metric"


def best_step(run: RunData) -> Best | None:
    """By `checkpoint.best_metric` where `keep_best` ranks checkpoints by it, else by the mean accuracy over all sources
    of held-out prompts. None where no step has that."""
    names, measure = run.accuracy_names, "held-out accuracy"
    if run.setting("checkpoint.keep_best"):
        measure = run.setting("checkpoint.best_metric")
        names = [measure]
    values = {
        record["step"]: statistics.fmean(record[name] for name in names)
        for record in run.metrics
        if names and all(record.get(name) is not None for name in names)
    }
    if not values:
        return None
    step = max(values, key=lambda step: (values[step], step))
    folder = RunPaths(run.directory).checkpoints / step_name(step)
    checkpoint = folder if (folder / MARKER).is_file() else None
    return Best(step, measure, values[step], values[max(values)], checkpoint)


MANY = 0.5
"""Share of the trajectories, or of the tool calls, from which a warning is given."""

FALLEN = "Likely: policy.optimizer.lr is too high. An earlier checkpoint may be better (checkpoint.keep_best)"
"""What to do when a run has got worse than its start."""

_FAILURES = {
    "parse_error": "the model does not write calls as rollout.tool_parser reads them",
    "timeout": "the programs run longer than sandbox.run_timeout_s",
    "runtime_error": "the programs raise errors, or read what the sandbox does not have",
}


@dataclass(frozen=True)
class Indicator:
    """One line of the health section; `good` None: not judged."""

    label: str
    value: str
    good: bool | None
    note: str


def first_batch_warnings(metrics: Mapping[str, float], dump: str, *, tools: bool) -> Iterator[str]:
    """Reasons why nothing can be learned from a batch, each with its likely cause and where to look; empty if there is
    none.

    metrics: of the step; missing ones are not judged. dump: the file with its trajectories. tools: whether the model
    can call any (`RolloutConfig.can_call_tools`).
    """
    yield from _no_verdict(metrics, dump)
    yield from _no_signal(metrics, dump)
    yield from _no_answer(metrics, dump)
    yield from _no_tool(metrics, dump, tools)
    if repeated := metrics.get("rollout/prompts_repeated"):
        fix = "lower rollout.prompts_per_step, or give more data"
        yield f"{repeated:.0f} groups are of a prompt that the batch already has: data.train is small; {fix}"


def _no_verdict(metrics: Mapping[str, float], dump: str) -> Iterator[str]:
    if share := metrics.get("reward/no_verdict", 0.0):
        cause = "the reward function raises, takes longer than reward.timeout_s, or returns None or NaN"
        look = f"see `no_verdict` in {dump}"
        yield f"{share:.0%} of the trajectories have no verdict, and teach nothing. Likely: {cause}; {look}"


def _no_signal(metrics: Mapping[str, float], dump: str) -> Iterator[str]:
    if metrics.get("reward/no_verdict") == 1:
        return  # said already
    if metrics.get("reward/groups_mixed") == 0:
        same, mean = metrics["reward/std"] == 0, metrics["reward/mean"]
        rewards = f"all rewards are {mean:g}" if same else "the rewards within each group are equal"
        if not same:
            cause = "samples of a prompt that are all alike (rollout.temperature)"
        elif mean > 0:
            cause = "a task that is too easy"
        else:
            cause = "ground truths that the reward cannot match, answers in another form, or a task far too hard"
        look = f"compare `final_text` and `answer` in {dump}"
        yield f"no group has both outcomes: {rewards}, so the gradient is zero. Likely: {cause}; {look}"
    elif metrics.get("actor/grad_norm_max") == 0:
        filtered = metrics.get("rollout/masked_tokens") == 1
        cause = "rollout.filters took every token out of the loss" if filtered else "every token is clipped"
        look = "see rollout/masked_* and pg_update/clip/* in metrics.jsonl"
        yield f"the gradient is zero, though groups have both outcomes. Likely: {cause}; {look}"


def _no_answer(metrics: Mapping[str, float], dump: str) -> Iterator[str]:
    without = metrics.get("reward/no_box", 0.0) / max(1.0, _trajectories(metrics))
    if without >= MANY:
        cause = "the prompt does not ask for a box, or the response ends before it"
        share = f"{without:.0%} of the answers have no complete \\boxed{{}}, and earn nothing"
        yield f"{share}. Likely: {cause}; see `segments` in {dump}"
    if (cut := metrics.get("rollout/truncated", 0.0)) >= MANY:
        cause = "rollout.max_response_tokens or max_turn_tokens is small, or the model does not end its turns"
        yield f"{cut:.0%} of the trajectories were cut off by a token limit. Likely: {cause}; see `segments` in {dump}"


def _no_tool(metrics: Mapping[str, float], dump: str, tools: bool) -> Iterator[str]:
    if tools and metrics.get("sandbox/calls") == 0:
        cause = "the prompt does not offer the tools, or the model writes calls that rollout.tool_parser does not read"
        yield f"no tool was called. Likely: {cause}; see `segments` in {dump}"
    if (failed := metrics.get("rollout/tool_error_rate", 0.0)) >= MANY:
        status = max(_FAILURES, key=lambda name: metrics[f"sandbox/{name}"])
        count, calls = metrics[f"sandbox/{status}"], metrics["sandbox/calls"]
        shown = f"{failed:.0%} of the tool calls failed, {count:.0f} of {calls:.0f} with {status}"
        yield f"{shown}. Likely: {_FAILURES[status]}; see `tool_calls` in {dump}"


def _trajectories(metrics: Mapping[str, float]) -> float:
    """How many trajectories were sampled; 0 if unknown."""
    each = metrics.get("rollout/model_tokens_mean", 0.0)
    return round(metrics["tokens/model"] / each) if each else 0.0


def learning_checks(run: RunData) -> Iterator[Indicator]:
    """Rows of the report, for the metrics that the run has."""
    yield from _trends(run)
    if (best := best_step(run)) is not None:
        yield Indicator("Best step", f"{best.step}", None, f"{best.measure} {best.value:.3g}: {best.where}")
    if mixed := run.series("reward/groups_mixed"):
        note = "no group had both outcomes: compare `final_text` and `answer` in trajectories/"
        yield _steps("Steps without signal", mixed, note)
    if missing := run.series("reward/no_verdict"):  # of the steps that miss any
        most, note = max(missing.values), f"largest share of a step, in {len(missing.values)} steps; they teach nothing"
        yield Indicator("Without a verdict", f"{most:.0%}", most < MANY, f"{note}: see `no_verdict` in trajectories/")
    if norm := run.series("actor/grad_norm_max"):
        note = "in all optimizer steps: no signal, or rollout.filters took every token out of the loss"
        yield _steps("Steps with zero gradient", norm, note)
    if boxes := _no_box(run):
        yield _share("Answers without a box", boxes, "they earn nothing: does the prompt ask for \\boxed{}?")
    if cut := run.series("rollout/truncated"):
        yield _share("Cut off", cut, "by rollout.max_response_tokens, max_turn_tokens or the context")
    if failed := run.series("rollout/tool_error_rate"):
        yield _share("Failed tool calls", failed, "see sandbox/* in metrics.jsonl and `tool_calls` in trajectories/")
    if repeated := run.series("rollout/prompts_repeated"):
        most = max(repeated.values)
        note = "groups of a prompt that the batch already had, in the worst step; data.train may be too small"
        yield Indicator("Repeated prompts", f"{most:,.0f}", most == 0, note)


def _trends(run: RunData) -> Iterator[Indicator]:
    decline = decline_of(run.metrics, run.setting("rollout.prompts_per_step", 1))
    for trend in decline.trends().values():
        note = "start → end"
        if trend.worse:
            note += f"; it fell by more than noise explains. {FALLEN}"
        elif not trend.better:
            note += "; noise may explain the difference"
        good = True if trend.better else False if trend.worse else None
        yield Indicator(trend.label.capitalize(), f"{trend.start:.3g} → {trend.now:.3g}", good, note)


def _steps(label: str, series: Series, note: str) -> Indicator:
    """How many steps have a zero; one in ten is no reason to worry."""
    zero = series.values.count(0.0)
    return Indicator(label, f"{zero} of {len(series.values)}", zero <= len(series.values) / 10, note)


def _share(label: str, series: Series, note: str) -> Indicator:
    mean = sum(series.values) / len(series.values)
    last = series.values[-1]
    shown = f"mean of all steps, {last:.0%} in the last; {note}"
    return Indicator(label, f"{mean:.0%}", mean < MANY and last < MANY, shown)


def _no_box(run: RunData) -> Series | None:
    """Share of the trajectories of each step."""
    steps = [record for record in run.metrics if record.get("reward/no_box") is not None and _trajectories(record)]
    shares = [record["reward/no_box"] / _trajectories(record) for record in steps]
    return Series([record["step"] for record in steps], shares) if steps else None
