"""Charts of groups: figures 1 and 2 of the paper, and more by position: clipping by sign, effective size, entropy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ctpo_megatron.report.charts import SHOWN, Axis, Chart, Curve, Spec, channel, curves, cycled, points
from ctpo_megatron.report.groups import RunGroup, runs_of
from ctpo_megatron.report.metric_charts import Band, mean_and_band
from ctpo_megatron.report.positions_of_groups import (
    GUIDE,
    LEAST,
    Growth,
    PositionSums,
    chosen_steps,
    clip_rates,
    effective_sizes,
    entropies,
    growth,
    late_positions,
    sampler_spread,
    why_not,
    window_rates,
)
from ctpo_megatron.report.run_data import ACCURACY
from ctpo_megatron.report.theme import CYCLE

T_AXIS = Axis("position t in the response, model tokens", log=True)
CLIP_KEYS = ("actor/pg_clipfrac", "pg_update/clip/total/rate")
"""Keys that the clip fraction of figure 2 may be: high and low bound, or the dual one too. The first that all have."""


def law_charts(groups: Sequence[RunGroup]) -> list[Chart]:
    """Figure 1; empty without a run that has positions.jsonl. Of one group, the upper part shows some steps of it."""
    late = [sums for group in groups if (sums := late_positions(group, "last"))]
    if not late:
        return []
    shown = chosen_steps(groups[0]) if len(groups) == 1 else late
    return [_growth_chart([growth(sums) for sums in shown], shown), _window_chart(late)]


def outcome_charts(groups: Sequence[RunGroup]) -> list[Chart]:
    """Figure 2: accuracies, clip fraction, response length and reward against the step."""
    names = sorted(set().union(*(run.accuracy_names for run in runs_of(groups))))
    sources = {name: match["source"] for name in names if (match := ACCURACY.fullmatch(name))}
    panels: list[tuple[str, str, str, str, tuple[float | None, float | None]]] = [
        (name, f"figure2_accuracy_{number}", f"Accuracy on {source}", "accuracy", (0.0, 1.0))
        for number, (name, source) in enumerate(sources.items(), start=1)
    ]
    if clip := _clip_key(groups):
        panels.append((clip, "figure2_clip", "Clipped tokens", "share of loss tokens", (0.0, None)))
    panels.append(("rollout/response_length_mean", "figure2_length", "Response length", "tokens", (0.0, None)))
    panels.append(("reward/mean", "figure2_reward", "Reward in training", "mean reward", (None, None)))
    return list(itertools.chain.from_iterable(_outcome(groups, *panel) for panel in panels))


def _clip_key(groups: Sequence[RunGroup]) -> str | None:
    runs = runs_of(groups)
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
    reasons = [(part.label, why_not(part, grown.law)) for part, grown in zip(sums, found, strict=True)]
    if said := [f" {label}: {reason}." for label, reason in reasons if reason]:
        caption += said[-1]
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
    steps = sorted(set().union(*(sums.steps for sums in late)))
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


_WHEN = f"second half of the run, bins of {LEAST} tokens and more"


def position_charts(groups: Sequence[RunGroup]) -> list[Chart]:
    """Empty without a run that has positions.jsonl."""
    whole = [sums for group in groups if (sums := late_positions(group, "all"))]
    last = [sums for group in groups if (sums := late_positions(group, "last"))]
    return [*_clipping(whole), *_effective(last), *_sampler(whole), *_entropy(whole)]


def _clipping(found: Sequence[PositionSums]) -> Iterator[Chart]:
    drawn = []
    for place, sums in enumerate(found):
        for number, (side, rates) in enumerate(clip_rates(sums).items()):
            words = f"{side} bound, {'positive' if side == 'high' else 'negative'} advantages"
            label = words if len(found) == 1 else f"{sums.label}: {words}"
            colour = CYCLE[(number if len(found) == 1 else place) % len(CYCLE)]
            drawn.append(Curve(label, rates.t, rates.values, colour, dashed=side == "dual"))
    caption = f"What each bound clips of the loss tokens of its sign, by position; all mini-batches, {_WHEN}."
    if drawn:
        spec = curves(drawn, T_AXIS, Axis("share of the loss tokens of the sign", 0.0))
        yield Chart("clip_by_position", "Clipping by position", caption, spec)


def _effective(found: Sequence[PositionSums]) -> Iterator[Chart]:
    sizes = [effective_sizes(sums) for sums in found]
    drawn = cycled(Curve(each.label, each.t, each.values) for each in sizes if each.t)
    caption = (
        "How many tokens there would be of equal weight, if each weighs exp S_t, as a share of all at that position; "
        f"last mini-batch, {_WHEN}."
    )
    if drawn:
        spec = curves(drawn, T_AXIS, Axis("effective share of tokens", 0.0, 1.0))
        yield Chart("ess_by_position", "Effective sample size by position", caption, spec)


def _sampler(found: Sequence[PositionSums]) -> Iterator[Chart]:
    known = [each for sums in found if (each := sampler_spread(sums)) and each.t]
    drawn = cycled(Curve(each.label, each.t, each.values) for each in known)
    caption = (
        "Standard deviation of the log-probability of a prefix by the trainer, before the updates of a step, less that "
        f"by the sampler, whatever the anchor is; {_WHEN}."
    )
    if drawn:
        spec = curves(drawn, T_AXIS, Axis("nats", 0.0))
        yield Chart("sampler_by_position", "Sampler against trainer by position", caption, spec)


def _entropy(found: Sequence[PositionSums]) -> Iterator[Chart]:
    known = [each for sums in found if (each := entropies(sums)) and each.t]
    drawn = cycled(Curve(each.label, each.t, each.values) for each in known)
    caption = f"Mean entropy of the policy by position, before the updates of a step; {_WHEN}."
    if drawn:
        yield Chart("entropy_by_position", "Entropy by position", caption, curves(drawn, T_AXIS, Axis("nats", 0.0)))
