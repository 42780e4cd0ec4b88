"""The figures of a report, a row each: name, question, data, axis. What a page draws of them, and their files."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.report.charts import (
    DASHED,
    SOLID,
    Axis,
    Chart,
    Curve,
    Dash,
    ReferenceLine,
    curves,
    kept,
    save_charts,
    stacked,
)
from ctpo_megatron.report.comparison import Comparison
from ctpo_megatron.report.groups import RunGroup, mean_and_band, run_name, runs_of
from ctpo_megatron.report.positions import law_charts, position_charts
from ctpo_megatron.report.run_data import ACCURACY, RunData, Series
from ctpo_megatron.report.theme import CYCLE
from ctpo_megatron.report.trajectories.ratio import ratio_name
from ctpo_megatron.tracking import drawn_in, known_metric

SCREEN = 200
"""Pixels an inch of the files of each report; a paper has `save_figures`."""
STEP, SFT_STEP = Axis("RL step", whole=True), Axis("SFT step", whole=True)
CLIP_KEYS = ("actor/pg_clipfrac", "pg_update/clip/total/rate")
"""What the clip fraction of figure 2 may be, by high and low bound or by the dual one too: the one that most runs have.
"""
_SMOOTHED_FROM = 100


@dataclass(frozen=True)
class Line:
    """One metric as a curve."""

    metric: str
    label: str
    colour: str = "blue"
    dash: Dash = SOLID


@dataclass(frozen=True)
class Figure:
    """A row of the table of figures. question: what the figure answers, its caption.

    axis: title of the y axis; empty: the unit of the first metric. ends: of this axis, where it is not `log`. own: its
    lines; None: the metrics that `KNOWN_METRICS` draws in it. compared: the metrics that several runs are compared by;
    empty: the first line. band: metrics around the first line. limit: configuration key and label of a horizontal line.
    optional: not missed where a run has no data for it. phases: whether the lines are parts of a step, to be stacked.
    """

    name: str
    title: str
    question: str
    axis: str = ""
    ends: tuple[float | None, float | None] = (0.0, None)
    log: bool = False
    own: Sequence[Line] | None = None
    compared: Sequence[str] = ()
    band: tuple[str, str] | None = None
    limit: tuple[str, str] | None = None
    optional: bool = False
    x: Axis = STEP
    phases: bool = False

    @property
    def lines(self) -> Sequence[Line]:
        """What is drawn, in order."""
        if self.own is not None:
            return self.own
        known = drawn_in(self.name)
        return [Line(row.name, how.label, how.colour, DASHED if how.dashed else SOLID) for row, how in known]

    @property
    def y(self) -> Axis:
        """The y axis."""
        title = self.axis or drawn_in(self.name)[0][0].unit
        return Axis(title, log=True) if self.log else Axis(title, *self.ends)

    def chart(self, run: RunData) -> Chart | None:
        """Draw all lines of one run; None where it has no value (on a log axis: no positive one)."""
        if self.phases:
            spec = stacked(_phases(self.lines, run), self.x, self.y)
        else:
            drawn = [curve for line in self.lines for curve in self._curves(line, run)]
            spec = curves(drawn, self.x, self.y, self._limits([run]))
        return Chart(self.name, self.title, self.question, spec) if spec["data"]["values"] else None

    def comparison(self, groups: Sequence[RunGroup]) -> Iterator[Chart]:
        """Draw the mean of each group with its band, and each run thinly, a chart for each compared metric."""
        metrics = self.compared or [line.metric for line in self.lines[:1]]
        for metric in metrics:
            drawn = [curve for index, group in enumerate(groups) for curve in _group_curves(metric, index, group)]
            if drawn:
                name = "-".join([self.name, *([re.sub(r"\W+", "-", metric)] if len(metrics) > 1 else [])])
                spec = curves(drawn, self.x, self.y, self._limits(runs_of(groups)))
                yield Chart(name, self.title, f"{self.question} Drawn: {metric}.", spec)

    def _limits(self, runs: Sequence[RunData]) -> list[ReferenceLine]:
        """Return the limit of the configurations, where all have the same."""
        values = {run.setting(self.limit[0]) for run in runs} if self.limit else set()
        return [ReferenceLine(value, self.limit[1]) for value in values if self.limit and value and len(values) == 1]

    def _curves(self, line: Line, run: RunData) -> Iterator[Curve]:
        """Yield one line of one run; of many supervised steps moving means, with the values beneath."""
        series = run.series(line.metric)
        if series is None:
            return
        smooth = smoothed(series.values) if self.x == SFT_STEP else None
        main = series if smooth is None else Series(series.steps, smooth)
        curve = _thinned(Curve(line.label, main.steps, main.values, line.colour, line.dash))
        ends = [run.series(metric) for metric in self.band or ()] if line == self.lines[0] else []
        if all(ends) and ends:
            known = [dict(zip(end.steps, end.values, strict=True)) for end in ends if end]
            low, high = ([values.get(step, float("nan")) for step in curve.x] for values in known)
            curve = replace(curve, low=low, high=high)
        yield curve
        if smooth is not None:
            yield _thinned(Curve("each step", series.steps, series.values, line.colour, of=line.label))


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """Return all figures by step, in the order of the report, for the metrics that any of the runs has."""
    names = sorted(set().union(*(run.names for run in runs)))
    accuracies = [name for name in names if ACCURACY.fullmatch(name)] or ["val/<data_source>/acc/mean@1"]
    parts = [name for name in names if _is_drawn_in(name, "reward_parts")]
    ratios = {ratio_name(run) for run in runs}
    ratio = next(iter(ratios))
    symbol = ratio.symbol if len(ratios) == 1 else "ratio r"
    words = f"log r is the {ratio.name}" if len(ratios) == 1 else "the runs have objectives with different ratios"
    return [
        Figure(
            "reward",
            "Reward",
            "Does the policy earn more? Mean reward of the trajectories of each step, before they are trained on.",
            ends=(0.0, 1.0),
        ),
        Figure(
            "accuracy",
            "Held-out accuracy",
            "Does it solve prompts that it is not trained on? Share of held-out prompts answered correctly.",
            axis="accuracy",
            ends=(0.0, 1.0),
            own=_cycled(accuracies, lambda name: match["source"] if (match := ACCURACY.fullmatch(name)) else name),
            compared=accuracies,
        ),
        Figure(
            "tool",
            "Tool use",
            "Does it use its tools? Trajectories with a successful tool call, and the share of calls that failed.",
            axis="share",
            ends=(0.0, 1.0),
        ),
        Figure(
            "signal",
            "Learning signal",
            "Is there anything to learn? Only groups with right and wrong answers teach. A trajectory that is cut off "
            "by its budget earns nothing.",
            axis="share",
            ends=(0.0, 1.0),
        ),
        Figure(
            "reward_parts",
            "Parts of the reward",
            "What is the reward made of? Components, turns and metrics of the reward functions: means over the "
            "trajectories of a step, or counts.",
            axis="mean or count",
            ends=(None, None),
            own=_cycled(parts, lambda name: name.removeprefix("reward/")),
            optional=True,
        ),
        Figure(
            "clip",
            "Clipped tokens",
            "How much does the clip cut? Tokens whose gradient it sets to zero, by the bound that did it.",
        ),
        Figure(
            "is_ratio",
            "Importance ratio",
            "How far does a step move the policy? Ratio of the updated policy to the anchor, over the loss tokens of "
            f"the step's last update; 1: unchanged; {words}. Band: all tokens.",
            axis=symbol,
            log=True,
            band=("pg_update/is_ratio/min", "pg_update/is_ratio/max"),
        ),
        Figure(
            "ess",
            "Effective sample size",
            "How many tokens would count as much, if each had the weight exp S_t of its prefix? 1: all.",
            ends=(0.0, 1.0),
            optional=True,
        ),
        Figure(
            "entropy",
            "Entropy",
            "Does the policy stay open? Mean entropy over the model tokens in the passes, before the updates.",
            optional=True,
        ),
        Figure(
            "mismatch",
            "Sampler against trainer",
            "Do sampler and trainer agree? Difference between their log-probabilities of the same tokens and weights.",
            axis="|Δ log p|, nats",
            log=True,
            limit=("rollout.mismatch_limit", "limit"),
        ),
        Figure(
            "grad_norm",
            "Gradient norm",
            "Are the steps of a usual size? Global gradient norm before clipping.",
            limit=("policy.optimizer.clip_grad", "clipped above"),
        ),
        Figure(
            "length",
            "Response length",
            "Do responses grow? Tokens after the prompt, and the part written by the model.",
        ),
        Figure(
            "staleness",
            "Staleness",
            "How far are the weights that sampled a token behind those that it trains?",
            optional=True,
        ),
        Figure(
            "time",
            "Time per step",
            "Where does the time go? Wall time of each step by phase; phases that overlap may add up to more.",
            compared=["time/step"],
            phases=True,
        ),
        Figure(
            "throughput",
            "Throughput",
            "How fast is each phase? Tokens over its wall time (rollout: those that the model wrote), and all over the "
            "whole step.",
            log=True,
            compared=["tokens/per_second"],
        ),
        Figure(
            "sft",
            "SFT loss",
            "Is the format learned? Loss of the supervised fine-tuning before reinforcement learning begins.",
            x=SFT_STEP,
        ),
        Figure(
            "memory",
            "Trainer memory",
            "Does memory grow? Most that a trainer rank has held since it began: tensors on a GPU, resident memory on "
            "a CPU. metrics.jsonl has all ranks.",
        ),
    ]


def _cycled(metrics: Sequence[str], label: Callable[[str], str]) -> list[Line]:
    return [Line(name, label(name), CYCLE[index % len(CYCLE)]) for index, name in enumerate(metrics)]


def _is_drawn_in(metric: str, figure: str) -> bool:
    row = known_metric(metric)
    return row is not None and row.drawn is not None and row.drawn.figure == figure


def _phases(lines: Sequence[Line], run: RunData) -> list[Curve]:
    """Return the seconds of each phase by step, and what is left of the step; those below 0.5 % are left out."""
    by_step = {record["step"]: record for record in run.metrics if any(record.get(line.metric) for line in lines)}
    steps = sorted(by_step)
    totals = [by_step[step].get("time/step") or 0.0 for step in steps]
    columns = [[by_step[step].get(line.metric) or 0.0 for step in steps] for line in lines]
    rest = [max(0.0, total - sum(parts)) for total, *parts in zip(totals, *columns, strict=True)]
    kept_at = kept(totals)
    found = zip([*lines, Line("", "other", "axis")], [*columns, rest], strict=True)
    return [
        Curve(line.label, [steps[at] for at in kept_at], [values[at] for at in kept_at], line.colour)
        for line, values in found
        if sum(values) > 0.005 * (sum(totals) or 1)
    ]


def _group_curves(metric: str, index: int, group: RunGroup) -> Iterator[Curve]:
    colour = CYCLE[index % len(CYCLE)]
    runs = [(run, series) for run in group.runs if (series := run.series(metric)) is not None]
    if (mean := mean_and_band(group, metric)) and mean.x:
        yield _thinned(replace(mean, colour=colour))
    if len(runs) > 1:
        for run, series in runs:
            yield _thinned(Curve(run_name(run), series.steps, series.values, colour, of=group.label))


def _thinned(curve: Curve) -> Curve:
    """Return the curve with no more points than can be seen."""
    chosen = kept(curve.y)

    def of(values: Sequence[float]) -> list[float]:
        return [values[index] for index in chosen]

    low, high = (ends and of(ends) for ends in (curve.low, curve.high))
    return replace(curve, x=of(curve.x), y=of(curve.y), low=low, high=high)


def smoothed(values: Sequence[float]) -> list[float] | None:
    """Return means over a window around each value, a fortieth of all wide; None for fewer than 100 values."""
    count = len(values)
    if count < _SMOOTHED_FROM:
        return None
    means = []
    for index in range(count):
        half = min(count // 80, index, count - 1 - index)  # symmetric: the ends are not bent
        means.append(statistics.fmean(values[index - half : index + half + 1]))
    return means


def charts_by_step(compared: Comparison) -> list[Chart]:
    """Return the charts by step with data in at least one run."""
    rows = figures(compared.runs)
    if len(compared.runs) > 1:
        return [chart for figure in rows for chart in figure.comparison(compared.groups)]
    return [chart for figure in rows if (chart := figure.chart(compared.runs[0]))]


def charts_by_position(compared: Comparison) -> list[Chart]:
    """Return the charts by position in the response."""
    return [*law_charts(compared.groups), *position_charts(compared.groups)]


def outcome_charts(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """Yield figure 2: accuracies, clip fraction, response length and reward against the step."""
    runs = runs_of(groups)
    names = sorted(set().union(*(run.accuracy_names for run in runs)))
    rows = [
        (name, f"accuracy_{number}", f"Accuracy on {match['source']}", Axis("accuracy", 0.0, 1.0))
        for number, name in enumerate(names, start=1)
        if (match := ACCURACY.fullmatch(name))
    ]
    clip = max(CLIP_KEYS, key=lambda key: sum(run.series(key) is not None for run in runs))
    rows.append((clip, "clip", "Clipped tokens", Axis("share of loss tokens", 0.0)))
    rows.append(("rollout/response_length_mean", "length", "Response length", Axis("tokens", 0.0)))
    rows.append(("reward/mean", "reward", "Reward in training", Axis("mean reward")))
    for metric, name, title, y in rows:
        drawn = [curve for index, group in enumerate(groups) for curve in _group_curves(metric, index, group)]
        if means := [curve for curve in drawn if curve.of is None]:
            caption = f"`{metric}` against the step."
            yield Chart(f"figure2_{name}", f"{title} (figure 2)", caption, curves(means, STEP, y))


def write_figures(run: RunData, charts: Sequence[Chart]) -> None:
    """Write `figures/<name>.png` of a run; files of an earlier report are removed."""
    folder = RunPaths(run.directory).figures
    written = save_charts(charts, folder, ("png",), SCREEN)
    for path in {*folder.glob("*.png")} - {*written}:
        path.unlink()


def save_figures(compared: Comparison, folder: Path) -> list[Path]:
    """Write every figure of a report as PNG, SVG and PDF, fit for a paper; returns the paths.

    Raises DamagedFileError.
    """
    charts = [*charts_by_step(compared), *charts_by_position(compared), *outcome_charts(compared.groups)]
    return save_charts(charts, folder)
