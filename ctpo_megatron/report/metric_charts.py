"""Panels as charts, of no more points than can be seen: all curves of one run, or a metric of groups with bands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ctpo_megatron.report.charts import Axis, Chart, Curve, ReferenceLine, curves, stacked
from ctpo_megatron.report.confidence import student_interval
from ctpo_megatron.report.groups import RunGroup, run_name, runs_of
from ctpo_megatron.report.panels import Line, Panel
from ctpo_megatron.report.run_data import RunData, Series
from ctpo_megatron.report.theme import CYCLE
from ctpo_megatron.tracking import PHASES

LEAST = 3
"""Seeds from which on the band is an interval: with two, Student's t is 12.7 standard errors wide."""


@dataclass(frozen=True)
class Band:
    """The mean of a metric over seeds, at the steps that all of them have.

    low, high: from `LEAST` seeds on the 95 % interval of the mean (Student's t); of two seeds both values; None for one
    seed. seeds: that have the metric. without: that do not. left_out: steps that only some of them have.
    """

    steps: list[float]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None
    seeds: list[str]
    without: list[str]
    left_out: int

    @property
    def kind(self) -> str:
        """What the band is, for captions."""
        count = len(self.seeds)
        if count == 1:
            kind = "one seed, no band"
        elif count < LEAST:
            kind = f"mean and range of {count} seeds"
        else:
            kind = f"mean of {count} seeds and its 95 % interval (Student's t)"
        if self.without:
            kind += f"; {len(self.without)} more without the metric"
        return kind + (f"; {self.left_out} steps that not all seeds have are left out" if self.left_out else "")


def mean_and_band(group: RunGroup, metric: str) -> Band | None:
    """None when no run of the group has the metric. Repeated runs of a seed count once, by their mean."""
    curves = {seed: _mean_of(runs, metric) for seed, runs in group.by_seed.items()}
    found = {seed: curve for seed, curve in curves.items() if curve}
    if not found:
        return None
    common = set.intersection(*map(set, found.values()))
    steps = sorted(common)
    columns = [[curve[step] for curve in found.values()] for step in steps]
    ends = _ends(columns, len(found))
    return Band(
        steps=steps,
        mean=[sum(column) / len(column) for column in columns],
        low=None if ends is None else [low for low, _ in ends],
        high=None if ends is None else [high for _, high in ends],
        seeds=list(found),
        without=[seed for seed in curves if seed not in found],
        left_out=len(set.union(*map(set, found.values()))) - len(steps),
    )


def _mean_of(runs: Sequence[RunData], metric: str) -> dict[float, float]:
    """Step -> mean over the runs that have a value there."""
    values: dict[float, list[float]] = {}
    for series in filter(None, (run.series(metric) for run in runs)):
        for step, value in zip(series.steps, series.values, strict=True):
            values.setdefault(step, []).append(value)
    return {step: sum(found) / len(found) for step, found in values.items()}


def _ends(columns: Sequence[Sequence[float]], seeds: int) -> list[tuple[float, float]] | None:
    if seeds == 1:
        return None
    if seeds < LEAST:
        return [(min(column), max(column)) for column in columns]
    return [student_interval(column) for column in columns]


_COLOURS = ("red", "blue", "purple", "cyan", "green", "orange", "ink", "grey", "axis")
PHASE_COLOURS = dict(zip((*PHASES, "other"), _COLOURS, strict=True))
"""Of each phase of a step, and of what is in none."""


def panel_chart(panel: Panel, run: RunData) -> Chart:
    """All curves of a panel for one run."""
    x, y = _axes(panel)
    if panel.kind == "phases":
        spec = stacked(_phases(run), x, y)
    else:
        drawn = [curve for line in panel.lines for curve in _curves_of(line, panel, run)]
        spec = curves(drawn, x, y, [*_references(panel, [run])])
    return Chart(panel.name, panel.title, panel.caption, spec)


def comparison_charts(panel: Panel, groups: Sequence[RunGroup]) -> Iterator[tuple[str, Chart]]:
    """Label and chart of each metric of a panel: the groups' means with their bands, and each run thinly beneath."""
    x, y = _axes(panel)
    rules = [*_references(panel, runs_of(groups))]
    for line in panel.compared:
        drawn = [curve for place, group in enumerate(groups) for curve in _of_group(line, place, group)]
        if drawn:
            slug = re.sub(r"\W+", "-", line.metric)
            title = f"{panel.title}: {line.label}" if len(panel.compared) > 1 else panel.title
            yield line.label, Chart(f"{panel.name}-{slug}", title, panel.caption, curves(drawn, x, y, rules))


def _axes(panel: Panel) -> tuple[Axis, Axis]:
    low, high = panel.limits or (None, None)
    return Axis(panel.xlabel, whole=panel.xlabel.endswith("step")), Axis(panel.ylabel, low, high, log=panel.log)


def _references(panel: Panel, runs: Sequence[RunData]) -> Iterator[ReferenceLine]:
    """The limit of the configurations, where all have the same."""
    if panel.reference:
        values = {run.setting(panel.reference[0]) for run in runs}
        if len(values) == 1 and (value := values.pop()):
            yield ReferenceLine(value, panel.reference[1])


def _curves_of(line: Line, panel: Panel, run: RunData) -> Iterator[Curve]:
    """One line of one run; with many noisy points smoothed, and the points beneath."""
    series = line.series(run)
    if series is None:
        return
    smooth = smoothed(series.values) if panel.smooth else None
    main = series if smooth is None else Series(series.steps, smooth)
    curve = replace(_thin(Curve(line.label, main.steps, main.values, line.colour)), dashed=line.dashed)
    if panel.band and line == panel.lines[0]:
        curve = _with_band(curve, run, *panel.band)
    yield curve
    if smooth is not None:
        yield replace(_thin(Curve("each step", series.steps, series.values, line.colour)), of=line.label)


def _with_band(curve: Curve, run: RunData, low: str, high: str) -> Curve:
    bottom, top = run.series(low), run.series(high)
    if bottom is None or top is None:
        return curve
    lows, highs = (dict(zip(each.steps, each.values, strict=True)) for each in (bottom, top))
    nothing = float("nan")
    return replace(curve, low=[lows.get(x, nothing) for x in curve.x], high=[highs.get(x, nothing) for x in curve.x])


def _of_group(line: Line, place: int, group: RunGroup) -> Iterator[Curve]:
    colour = CYCLE[place % len(CYCLE)]
    runs = [(run, series) for run in group.runs if (series := line.series(run)) is not None]
    if len(runs) == 1:
        yield _thin(Curve(group.label, runs[0][1].steps, runs[0][1].values, colour))
        return
    if (band := mean_and_band(group, line.metric)) and band.steps:
        places = kept(band.mean)
        steps, mean, low, high = (
            None if column is None else [column[at] for at in places]
            for column in (band.steps, band.mean, band.low, band.high)
        )
        yield Curve(group.label, steps or [], mean or [], colour, low=low, high=high)
    for run, series in runs:
        yield replace(_thin(Curve(run_name(run), series.steps, series.values, colour)), of=group.label)


def _thin(curve: Curve) -> Curve:
    places = kept(curve.y)
    return replace(curve, x=[curve.x[at] for at in places], y=[curve.y[at] for at in places])


def _phases(run: RunData) -> list[Curve]:
    """Seconds of each phase by step, and what is left of the step; phases of less than 0.5 % are left out."""
    by_step = {
        record["step"]: record for record in run.metrics if record.get("time/step") or record.get("time/rollout")
    }
    steps = sorted(by_step)
    found = {name: [by_step[step].get(f"time/{name}") or 0.0 for step in steps] for name in PHASES}
    totals = [by_step[step].get("time/step") or 0.0 for step in steps]
    found["other"] = [max(0.0, total - sum(parts)) for total, *parts in zip(totals, *found.values(), strict=True)]
    shown = {name: values for name, values in found.items() if sum(values) > 0.005 * (sum(totals) or 1)}
    places = kept(totals)
    xs = [steps[at] for at in places]
    return [Curve(name, xs, [values[at] for at in places], PHASE_COLOURS[name]) for name, values in shown.items()]


MOST = 400
"""Points of a curve that are kept."""
_SMOOTHED_FROM = 100


def kept(values: Sequence[float]) -> list[int]:
    """Places of the values to keep: of each interval the smallest and the largest, so that peaks stay."""
    if len(values) <= MOST:
        return list(range(len(values)))
    stride = -(-2 * len(values) // MOST)
    places = {0, len(values) - 1}
    for start in range(0, len(values), stride):
        interval = range(start, min(start + stride, len(values)))
        places |= {min(interval, key=values.__getitem__), max(interval, key=values.__getitem__)}
    return sorted(places)


def smoothed(values: Sequence[float]) -> list[float] | None:
    """Means over a window around each value, a fortieth of all wide; None for fewer than 100 values."""
    count = len(values)
    if count < _SMOOTHED_FROM:
        return None
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for place in range(count):
        half = min(count // 80, place, count - 1 - place)  # symmetric: the ends are not bent
        means.append((sums[place + half + 1] - sums[place - half]) / (2 * half + 1))
    return means
