"""Charts by position in the response, from positions.jsonl: clipping by sign, effective sample size, entropy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctpo_megatron.report.axes import Axis
from ctpo_megatron.report.charts import Chart, Curve, curves, cycled
from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.paper_figures import T_AXIS
from ctpo_megatron.report.positions_of_groups import (
    LEAST,
    PositionSums,
    clip_rates,
    effective_sizes,
    entropies,
    late_positions,
)
from ctpo_megatron.report.theme import CYCLE

_WHEN = f"second half of the run, bins of {LEAST} tokens and more"


def position_charts(groups: Sequence[RunGroup]) -> list[Chart]:
    """Empty without a run that has positions.jsonl."""
    whole = [sums for group in groups if (sums := late_positions(group, "all"))]
    last = [sums for group in groups if (sums := late_positions(group, "last"))]
    return [*_clipping(whole), *_effective(last), *_entropy(whole)]


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


def _entropy(found: Sequence[PositionSums]) -> Iterator[Chart]:
    known = [each for sums in found if (each := entropies(sums)) and each.t]
    drawn = cycled(Curve(each.label, each.t, each.values) for each in known)
    caption = f"Mean entropy of the policy by position, before the updates of a step; {_WHEN}."
    if drawn:
        yield Chart("entropy_by_position", "Entropy by position", caption, curves(drawn, T_AXIS, Axis("nats", 0.0)))
