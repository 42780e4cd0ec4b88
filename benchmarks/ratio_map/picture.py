"""docs/figures/map.svg: every measured difference from the first objective, with its interval and its prediction."""

from __future__ import annotations

from typing import Any

from benchmarks.ratio_map.cells import FIRST, OBJECTIVES, REGIMES, TASKS, Cell
from benchmarks.ratio_map.page import ROOT, Stored

FILE = ROOT / "docs" / "figures" / "map.svg"
TITLES = {
    "on-policy": "one pass over fresh samples",
    "passes": "four passes over each batch",
    "lag": "samples of 4 steps before",
    "frozen": "a fixed recording",
}
"""Regime -> title of its panels."""
BOUNDS = {"cuts": "cuts the gradient", "weighs": "limits the weight"}
COLOURS = ("#4c6ef5", "#e8590c")


def rows(stored: Stored) -> list[dict[str, Any]]:
    """Return one row for each measured cell: names, difference, ends of its interval, prediction.

    The first objective has the difference 0 and no interval.
    """
    found = []
    for task in TASKS:
        for regime in REGIMES:
            for objective in OBJECTIVES:
                cell = Cell(task, regime, objective)
                less, first = stored.measured(cell), objective.name == FIRST
                if less is None and not (first and cell.name in stored.results):
                    continue
                row: dict[str, Any] = {
                    "task": task.name,
                    "regime": TITLES[regime.name],
                    "ratio": objective.ratio,
                    "bound": BOUNDS[objective.bound],
                    "difference": 0.0 if less is None else round(less.value, 4),
                }
                if less is not None:
                    row["predicted"] = round(stored.predicted(cell)[0], 4)
                    if less.interval is not None:
                        row["low"], row["high"] = (round(end, 4) for end in less.interval)
                found.append(row)
    return found


def spec(stored: Stored) -> dict[str, Any]:
    """Return the Vega-Lite specification of the picture: a panel for each task and regime that is measured."""
    place = {
        "y": {"field": "ratio", "type": "nominal", "sort": ["prefix", "token", "sequence"], "title": "ratio"},
        "yOffset": {"field": "bound", "sort": [*BOUNDS.values()]},
        "color": {
            "field": "bound",
            "sort": [*BOUNDS.values()],
            "scale": {"domain": [*BOUNDS.values()], "range": [*COLOURS]},
            "legend": {"title": "its bound", "orient": "top"},
        },
    }
    value = {"type": "quantitative", "title": "mean reward minus CTPO's"}
    layers = [
        {"mark": {"type": "rule", "color": "#868e96"}, "encoding": {"x": {"datum": 0, **value}}},
        {
            "mark": {"type": "rule", "strokeWidth": 2.5},
            "encoding": {**place, "x": {"field": "low", **value}, "x2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "opacity": 1, "size": 60},
            "encoding": {**place, "x": {"field": "difference", **value}},
        },
        {
            "mark": {"type": "point", "shape": "diamond", "filled": False, "opacity": 1, "size": 50},
            "encoding": {**place, "x": {"field": "predicted", **value}},
        },
    ]
    header = {"labelOrient": "top", "labelAnchor": "start", "labelPadding": 2, "labelFontWeight": "bold"}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": "white",
        "title": {
            "text": "Which importance ratio learns fastest, and which bound",
            "subtitle": "Points: measured, with 95 % intervals of three seeds. Diamonds: predicted before.",
            "anchor": "start",
        },
        "data": {"values": rows(stored)},
        "facet": {
            "row": {"field": "regime", "sort": [*TITLES.values()], "title": None, "header": header},
            "column": {"field": "task", "sort": [task.name for task in TASKS], "title": None},
        },
        "spacing": {"row": 8},
        "spec": {"width": 300, "height": {"step": 13}, "layer": layers},
        "config": {"font": "sans-serif", "axis": {"grid": False}},
    }


def draw(stored: Stored) -> str:
    """Return the picture as SVG."""
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(spec(stored))
    return svg
