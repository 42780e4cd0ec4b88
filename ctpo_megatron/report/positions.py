"""Charts of groups by position in the response, from positions.jsonl, and figure 1 of the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctpo_megatron.report.charts import DASHED, DOTTED, SOLID, Axis, Chart, Curve, curves, cycled
from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.theme import CYCLE
from ctpo_megatron.tracking import read_positions

if TYPE_CHECKING:
    from ctpo_megatron.base.positions import PositionStats
    from ctpo_megatron.report.position_law import LawInterval, PositionLaw
    from ctpo_megatron.report.run_data import RunData

LEAST = 30
"""Tokens of a bin from which on it is shown."""
CERTAIN, MANY = 0.1, 0.25
"""A position adds almost nothing to S_t where the mean d_t^2 is below this share of its mean over all tokens. Where at
least this share of the tokens is at such positions, that is why the law fails.
"""
GUIDE = 0.2
"""Half width of the band around sigma sqrt(t), as a share of it: the paper's guide, no interval."""
T_AXIS = Axis("position t in the response, model tokens", log=True)
Shares = tuple[list[float], list[float]]
"""Mean positions of bins with at least `LEAST` tokens, and a quantity there."""


@dataclass(frozen=True)
class PositionSums:
    """Sums over the runs of a group and over `steps`, each once in ascending order.

    sources: run and step of each line.
    """

    label: str
    steps: list[int]
    stats: PositionStats
    sources: list[tuple[RunData, int]]

    def column(self, name: str) -> Any:
        """Return a sum by bin, over all signs of the advantage."""
        return self.stats.column(name).sum(0)

    def shares(self, upper: Any, lower: Any, count: Any = None) -> Shares:
        """Divide one array by another, by bin. count: tokens of each bin, where the lower array is not that."""
        import numpy as np

        computed, tokens = self.column("n_computed"), lower if count is None else count
        used = np.flatnonzero((tokens >= LEAST) & (computed > 0) & (lower > 0) & np.isfinite(upper))
        return (self.column("t")[used] / computed[used]).tolist(), (upper[used] / lower[used]).tolist()


@dataclass(frozen=True)
class Growth:
    """Standard deviation of S_t, nats, at mean positions t of bins (figure 1, top).

    law: None for fewer than three bins, or without any spread. interval: how sure it is. why_not: a sentence where the
    law fails and tokens that are almost certain explain it; else empty.
    """

    label: str
    t: list[float]
    std: list[float]
    law: PositionLaw | None
    interval: LawInterval
    why_not: str

    @classmethod
    def of(cls, sums: PositionSums) -> Growth:
        """Return the points and their fits, as the paper makes them."""
        from ctpo_megatron.report.position_law import fit_law, law_interval, points_of_bins

        points = points_of_bins(sums.stats)
        law = fit_law(points)
        interval = law_interval(sums.sources if law else ())
        why_not = _certain_tokens(sums) if law and not law.how else ""
        return cls(sums.label, points.t.tolist(), points.std.tolist(), law, interval, why_not)

    @property
    def verdict(self) -> str:
        """Whether sqrt(t) holds, in words."""
        return self.interval.verdict(self.law) if self.law else "too few tokens at enough positions for a fit"

    def curves(self, colour: str) -> Iterator[Curve]:
        """Yield the points, and sigma sqrt(t) with the guide around it."""
        yield Curve(self.label, self.t, self.std, colour)
        if self.law:
            fit = [self.law.sigma * t**0.5 for t in self.t]
            low, high = ([(1 + side) * value for value in fit] for side in (-GUIDE, GUIDE))
            yield Curve(f"{self.label}, sigma sqrt(t)", self.t, fit, colour, low=low, high=high, of=self.label)


def late_positions(group: RunGroup, mini_batch: str) -> PositionSums | None:
    """Sum the second half of each run's steps with such records (`all`, `first`, `last`); None without any."""
    records: list[tuple[RunData, dict[str, Any]]] = []
    for run in group.runs:
        found = [*read_positions(run.directory, mini_batch)]
        records += [(run, record) for record in found if 2 * record["step"] > found[-1]["step"]]
    return _summed(group.label, records) if records else None


def chosen_steps(group: RunGroup) -> list[PositionSums]:
    """Return the first, the middle and the last step with records of the last mini-batch in all runs."""
    by_step: dict[int, list[tuple[RunData, dict[str, Any]]]] = {}
    for run in group.runs:
        for record in read_positions(run.directory, "last"):
            by_step.setdefault(record["step"], []).append((run, record))
    steps = sorted(step for step, records in by_step.items() if len(records) == len(group.runs))
    middle = sorted(steps[1:-1], key=lambda step: abs(2 * step - steps[-1]))[:1]
    chosen = sorted({*steps[:1], *middle, *steps[-1:]})
    return [_summed(f"step {step}", by_step[step]) for step in chosen]


def window_rates(sums: PositionSums) -> dict[str, Shares]:
    """Return the share of all loss tokens, advantage 0 included, that a window clips (figure 1, bottom).

    `fixed` and `widening` are the paper's two windows on S_t, `own` is what the bounds of the run's objective did.
    """
    sides = {"fixed": ("high", "low"), "widening": ("high", "low"), "clip": ("high", "low", "dual")}
    tokens, found = sums.column("n_loss"), {}
    for window, names in sides.items():
        clipped = sum(sums.column(f"{window}_{side}") for side in names)
        found["own" if window == "clip" else window] = sums.shares(clipped, tokens)
    return found


def clip_rates(sums: PositionSums) -> dict[str, Shares]:
    """Return the share of the loss tokens of a sign that each bound clips, without bounds that clip nothing.

    `high` is of positive advantages, `low` and `dual` are of negative ones.
    """
    found = {}
    for side, sign in {"high": 0, "low": 1, "dual": 1}.items():
        clipped, tokens = (sums.stats.column(name)[sign] for name in (f"clip_{side}", "n_loss"))
        if clipped.any():
            found[side] = sums.shares(clipped, tokens)
    return found


def effective_sizes(sums: PositionSums) -> Shares:
    """Effective sample size of the weights exp(min(S_t, 10)), as a share of the tokens: (sum r)^2 / (n sum r^2)."""
    first, second, count = map(sums.column, ("r", "r2", "n_computed"))
    return sums.shares(first**2, second * count, count)


def sampler_spread(sums: PositionSums) -> Shares:
    """Standard deviation of M_t, the sum over the prefix of trainer less sampler, nats; empty where it is not known.

    The trainer is that before the updates of a step.
    """
    import numpy as np

    count, _, _, first, second = sums.stats.sampler.T
    tokens = np.maximum(1, count)
    spread = np.sqrt(np.maximum(0.0, second / tokens - (first / tokens) ** 2))
    return sums.shares(spread * count, count)


def entropies(sums: PositionSums) -> Shares:
    """Mean entropy before the updates of a step, nats; empty where it is not known."""
    return sums.shares(*map(sums.column, ("entropy", "n_entropy")))


def law_charts(groups: Sequence[RunGroup]) -> list[Chart]:
    """Figure 1; empty without a run that has positions.jsonl. Of one group, the upper part shows some steps of it."""
    late = [sums for group in groups if (sums := late_positions(group, "last"))]
    if not late:
        return []
    shown = chosen_steps(groups[0]) if len(groups) == 1 else late
    return [_growth_chart(shown), _window_chart(late)]


def _growth_chart(shown: Sequence[PositionSums]) -> Chart:
    found = [Growth.of(sums) for sums in shown]
    drawn = [curve for index, each in enumerate(found) for curve in each.curves(CYCLE[index % len(CYCLE)])]
    caption = (
        "Does the spread of S_t grow like sqrt(t)? Cumulative log-ratio at position t, last mini-batch, "
        f"{_steps(shown)}. Lines: sigma sqrt(t), shaded {GUIDE:.0%} on either side: a visual guide, not an interval. "
        + " ".join(f"{each.label}: {each.verdict}." for each in found)
    )
    caption += "".join([f" {each.label}: {each.why_not}." for each in found if each.why_not][-1:])
    spec = curves(drawn, T_AXIS, Axis("standard deviation of S_t, nats", log=True), joined=False)
    return Chart("figure1_top", "Growth of S_t (figure 1, top)", caption, spec)


def _window_chart(late: Sequence[PositionSums]) -> Chart:
    words = {"fixed": "fixed window", "widening": "widening window", "own": "the run's own bounds"}
    dashes = {"fixed": DASHED, "widening": SOLID, "own": DOTTED}
    caption = (
        "What do the windows cut? Share of all loss tokens, advantage 0 included, outside of the fixed window [0.5, 5] "
        "of exp S_t, outside of the window [-0.025, 0.05] sqrt(t) of S_t, and clipped by the objective of the run; "
        f"last mini-batch, {_steps(late)}."
    )
    drawn = [*_several(late, window_rates, words, dashes)]
    spec = curves(drawn, T_AXIS, Axis("share of loss tokens", 0.0))
    return Chart("figure1_bottom", "Clip rate by position (figure 1, bottom)", caption, spec)


def _several(
    found: Sequence[PositionSums],
    rates: Callable[[PositionSums], dict[str, Shares]],
    words: Mapping[str, str],
    dashes: Mapping[str, tuple[int, int]],
) -> Iterator[Curve]:
    """Yield the curves of each group. Of several groups the colour is the group's; of one it tells curves apart."""
    alone = len(found) == 1
    for index, sums in enumerate(found):
        for number, (name, (t, values)) in enumerate(rates(sums).items()):
            label = words[name] if alone else f"{sums.label}, {words[name]}"
            yield Curve(label, t, values, CYCLE[(number if alone else index) % len(CYCLE)], dashes.get(name, SOLID))


def position_charts(groups: Sequence[RunGroup]) -> list[Chart]:
    """Return the charts by position that any group has data for."""
    whole, last = (
        [sums for group in groups if (sums := late_positions(group, mini_batch))] for mini_batch in ("all", "last")
    )
    words = {"high": "high bound, positive advantages"}
    words |= {side: f"{side} bound, negative advantages" for side in ("low", "dual")}
    clipping = [*_several(whole, clip_rates, words, {"dual": DASHED})]
    when = f"second half of the run, bins of {LEAST} tokens and more"
    found = (
        (
            "clip_by_position",
            "Clipping by position",
            f"What does each bound clip of the loss tokens of its sign? All mini-batches, {when}.",
            Axis("share of the loss tokens of the sign", 0.0),
            clipping,
        ),
        (
            "ess_by_position",
            "Effective sample size by position",
            "How many tokens of equal weight would there be, if each weighs exp S_t? A share of all at that position. "
            f"Last mini-batch, {when}.",
            Axis("effective share of tokens", 0.0, 1.0),
            _one_each(last, effective_sizes),
        ),
        (
            "sampler_by_position",
            "Sampler against trainer by position",
            "How far do sampler and trainer drift apart? Standard deviation of the log-probability of a prefix by the "
            f"trainer, before the updates of a step, less that by the sampler, whatever the anchor is; {when}.",
            Axis("nats", 0.0),
            _one_each(whole, sampler_spread),
        ),
        (
            "entropy_by_position",
            "Entropy by position",
            f"Where is the policy open? Mean entropy before the updates of a step; {when}.",
            Axis("nats", 0.0),
            _one_each(whole, entropies),
        ),
    )
    return [Chart(name, title, caption, curves(drawn, T_AXIS, y)) for name, title, caption, y, drawn in found if drawn]


def _one_each(found: Sequence[PositionSums], quantity: Callable[[PositionSums], Shares]) -> list[Curve]:
    return cycled(Curve(sums.label, t, values) for sums in found for t, values in [quantity(sums)] if t)


def _steps(late: Sequence[PositionSums]) -> str:
    steps = sorted(set().union(*(sums.steps for sums in late)))
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def _certain_tokens(sums: PositionSums) -> str:
    """Say that tokens which are almost certain explain why the law fails; empty where they are few."""
    import numpy as np

    tokens, squares = map(sums.column, ("n_computed", "d2"))
    used = tokens >= LEAST
    still = used & (squares < CERTAIN * tokens * squares[used].sum() / np.maximum(1, tokens[used].sum()))
    share = tokens[still].sum() / np.maximum(1, tokens[used].sum())
    if share < MANY:
        return ""
    return (
        f"{share:.0%} of the tokens are at positions where the token is almost certain, as in the fixed parts of a "
        "tool call: they add nothing to the spread of S_t (docs/notebooks/theory.ipynb, When sqrt(t) fails)"
    )


def _summed(label: str, records: Sequence[tuple[RunData, dict[str, Any]]]) -> PositionSums:
    from ctpo_megatron.base.positions import PositionStats

    sources = [(run, record["step"]) for run, record in records]
    parts = (PositionStats.of_record(record) for _, record in records)
    return PositionSums(label, sorted({step for _, step in sources}), sum(parts, PositionStats.empty()), sources)
