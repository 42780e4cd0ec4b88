"""Figures of a study: bias and variance by position, and clip rates."""

from __future__ import annotations

from collections.abc import Sequence

from ctpo_megatron.report import Axis, Chart, Curve, curves, points
from theory_study import Study
from theory_tables import TableCell, TheoryTable
from theory_tree import RATIOS
from theory_walk import DRIFT, NO_DRIFT, TOKENS

COLOURS = {"token": "orange", "prefix": "blue", "CTPO, prefix": "blue", "GSPO": "purple", "sequence": "green"}
KINDS = {NO_DRIFT: "grey", DRIFT: "blue", TOKENS: "orange"}


def charts(found: Study) -> list[Chart]:
    """One for each figure."""
    bias, ratios = Axis("relative bias", low=0), list(RATIOS.values())
    return [
        _by_position(
            found.table("bias"),
            "Bias of term t, advantage of the prefix",
            "Relative bias of the gradient's term t with an advantage A(s_t, a_t): none with the prefix ratio and the "
            "sequence ratio.",
            ratios,
            bias,
        ),
        _by_position(
            found.table("outcome_bias_by_position"),
            "Bias of term t, one outcome reward",
            "Relative bias of the gradient's term t with one reward for the whole sequence: the prefix ratio is exact "
            "in the last term only.",
            ratios,
            bias,
        ),
        _by_position(
            found.table("variance"),
            "Variance of the ratios",
            "The prefix ratio varies more with each token, and at most as much as the sequence ratio.",
            ["token", "prefix", "sequence"],
            Axis("variance of the ratio", log=True),
        ),
        *(_clip_rates(found.curves, window) for window in ("widening", "fixed")),
    ]


def _by_position(table: TheoryTable, title: str, caption: str, names: Sequence[str], y: Axis) -> Chart:
    t = _numbers(table.column("t"))
    series = [Curve(name, t, _numbers(table.column(name)), COLOURS[name], name == "sequence") for name in names]
    return Chart(table.name, title, caption, curves(series, Axis("position t", whole=True), y))


def _clip_rates(table: TheoryTable, window: str) -> Chart:
    """Formulas as lines, walks as points."""
    formulas, walks = [], []
    for kind, colour in KINDS.items():
        rows = [_numbers(row[2:]) for row in table.rows if row[:2] == (window, kind)]
        t, formula, simulated, _ = zip(*rows, strict=True)
        walks.append(Curve(kind, t, simulated, colour))
        if kind != TOKENS:  # the line of the drift is theirs as well
            formulas.append(Curve(kind, t, formula, colour))
    spec = points(walks, formulas, Axis("position t", log=True), Axis("clip rate", low=0))
    caption = f"Share of tokens that the {window} window cuts: lines by formula, points counted over simulated walks."
    return Chart(f"clip_rate_{window}", f"Clip rate, {window} window", caption, spec)


def _numbers(cells: Sequence[TableCell]) -> list[float]:
    return [float(cell) for cell in cells]
