"""The figures of the paper: growth of S_t and windows by position (1), results against the step (2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctpo_megatron.report.axes import Axis, channel
from ctpo_megatron.report.charts import SHOWN, Chart, Curve, Spec, curves, cycled, points
from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.intervals import Band, mean_and_band
from ctpo_megatron.report.positions_of_groups import (
    GUIDE,
    Growth,
    PositionSums,
    chosen_steps,
    growth,
    late_positions,
    window_rates,
)
from ctpo_megatron.report.run_data import ACCURACY
from ctpo_megatron.report.theme import CYCLE

T_AXIS = Axis("position t in the response, model tokens", log=True)
CLIP_KEYS = ("actor/pg_clipfrac", "pg_update/clip/total/rate")
"""Keys that the clip fraction of figure 2 may be: high and low bound, or the dual one too. The first that all have."""


def paper_figures(groups: Sequence[RunGroup]) -> list[Chart]:
    """Figures 1 and 2, as far as the runs have their data."""
    return [*law_charts(groups), *outcome_charts(groups)]


def law_charts(groups: Sequence[RunGroup]) -> list[Chart]:
    """Figure 1; empty without a run that has positions.jsonl. Of one group, the upper part shows some steps of it."""
    late = [sums for group in groups if (sums := late_positions(group, "last"))]
    if not late:
        return []
    shown = chosen_steps(groups[0]) if len(groups) == 1 else late
    return [_growth_chart([growth(sums) for sums in shown], shown), _window_chart(late)]


def outcome_charts(groups: Sequence[RunGroup]) -> list[Chart]:
    """Figure 2: accuracies, clip fraction, response length and reward against the step."""
    sources = {name: match["source"] for name in _names(groups) if (match := ACCURACY.fullmatch(name))}
    panels: list[tuple[str, str, str, str, tuple[float | None, float | None]]] = [
        (name, f"figure2_accuracy_{number}", f"Accuracy on {source}", "accuracy", (0.0, 1.0))
        for number, (name, source) in enumerate(sources.items(), start=1)
    ]
    if clip := _clip_key(groups):
        panels.append((clip, "figure2_clip", "Clipped tokens", "share of loss tokens", (0.0, None)))
    panels.append(("rollout/response_length_mean", "figure2_length", "Response length", "tokens", (0.0, None)))
    panels.append(("reward/mean", "figure2_reward", "Reward in training", "mean reward", (None, None)))
    return [chart for panel in panels for chart in _outcome(groups, *panel)]


def _names(groups: Sequence[RunGroup]) -> list[str]:
    return sorted({name for group in groups for run in group.runs for name in run.accuracy_names})


def _clip_key(groups: Sequence[RunGroup]) -> str | None:
    runs = [run for group in groups for run in group.runs]
    having = (key for key in CLIP_KEYS if all(run.series(key) for run in runs))
    anywhere = (key for key in CLIP_KEYS if any(run.series(key) for run in runs))
    return next(having, next(anywhere, None))


def _outcome(
    groups: Sequence[RunGroup], metric: str, name: str, title: str, unit: str, ends: tuple[float | None, float | None]
) -> Iterator[Chart]:
    found = {group.label: band for group in groups if (band := mean_and_band(group, metric)) and band.steps}
    if found:
        drawn = cycled(
            Curve(label, band.steps, band.mean, low=band.low, high=band.high) for label, band in found.items()
        )
        caption = f"`{metric}` against the step: {_kinds(found)}."
        yield Chart(name, f"{title} (figure 2)", caption, curves(drawn, Axis("RL step", whole=True), Axis(unit, *ends)))


def _kinds(found: dict[str, Band]) -> str:
    """What the bands are, said once where it is the same for all."""
    kinds = {label: band.kind for label, band in found.items()}
    if len(set(kinds.values())) == 1:
        return next(iter(kinds.values()))
    return ", ".join(f"{label}: {kind}" for label, kind in kinds.items())


def _growth_chart(found: Sequence[Growth], sums: Sequence[PositionSums]) -> Chart:
    y = Axis("standard deviation of S_t, nats", log=True)
    measured = cycled(Curve(each.label, each.t, each.std) for each in found)
    fitted = [
        Curve(each.label, each.t, each.fitted(), curve.colour)
        for each, curve in zip(found, measured, strict=True)
        if each.law
    ]
    spec = points(measured, fitted, T_AXIS, y)
    if fitted:
        spec["layer"].insert(0, _guide(fitted, y))
    caption = (
        f"Spread of the cumulative log-ratio at position t, last mini-batch, {_steps(sums)}. Lines: sigma sqrt(t), "
        f"shaded {GUIDE:.0%} on either side, which is a guide and no interval. "
        + " ".join(f"{each.label}: {each.verdict}." for each in found)
    )
    return Chart("figure1_top", "Growth of S_t (figure 1, top)", caption, spec)


def _guide(fitted: Sequence[Curve], y: Axis) -> Spec:
    rows = [
        {"x": t, "low": (1 - GUIDE) * value, "high": (1 + GUIDE) * value, "series": curve.label}
        for curve in fitted
        for t, value in zip(curve.x, curve.y, strict=True)
    ]
    encoding = {"y": channel("low", y), "y2": {"field": "high"}}
    mark = {"type": "area", "opacity": 0.12, "clip": True}
    return {"data": {"values": rows}, "transform": [SHOWN], "mark": mark, "encoding": encoding}


def _window_chart(late: Sequence[PositionSums]) -> Chart:
    """Of several groups the colour is the group's; of one it tells the windows apart."""
    drawn = []
    for place, sums in enumerate(late):
        for number, (window, rates) in enumerate(window_rates(sums).items()):
            words = "the run's own bounds" if window == "own" else f"{window} window"
            label = words if len(late) == 1 else f"{sums.label}, {words}"
            colour = CYCLE[(number if len(late) == 1 else place) % len(CYCLE)]
            fixed, own = window == "fixed", window == "own"
            drawn.append(Curve(label, rates.t, rates.values, colour, dashed=fixed, dotted=own))
    caption = (
        "Share of all loss tokens, advantage 0 included, outside of the fixed window [0.5, 5] of exp S_t, outside of "
        "the window [-0.025, 0.05] sqrt(t) of S_t, and clipped by the objective of the run itself; "
        f"last mini-batch, {_steps(late)}."
    )
    spec = curves(drawn, T_AXIS, Axis("share of loss tokens", 0.0))
    return Chart("figure1_bottom", "Clip rate by position (figure 1, bottom)", caption, spec)


def _steps(late: Sequence[PositionSums]) -> str:
    steps = sorted({step for sums in late for step in sums.steps})
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
