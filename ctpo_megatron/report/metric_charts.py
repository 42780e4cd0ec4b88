"""Panels as charts: all curves of one run together, or one metric of several runs at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ctpo_megatron.report.axes import Axis
from ctpo_megatron.report.charts import Chart, Curve, ReferenceLine, curves, stacked
from ctpo_megatron.report.groups import RunGroup, run_name
from ctpo_megatron.report.intervals import mean_and_band
from ctpo_megatron.report.panels import Line, Panel
from ctpo_megatron.report.run_data import RunData, Series
from ctpo_megatron.report.theme import CYCLE
from ctpo_megatron.report.thinning import kept, smoothed
from ctpo_megatron.tracking import PHASES

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
    rules = [*_references(panel, [run for group in groups for run in group.runs])]
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
