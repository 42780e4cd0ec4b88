"""Colours and style of all charts: light for files, light and dark for pages."""

from __future__ import annotations

from typing import Any

LIGHT = {
    "ink": "#1c2024",
    "muted": "#5c636b",
    "axis": "#b4bac2",
    "grid": "#e6e9ed",
    "blue": "#2f6fde",
    "orange": "#c96a12",
    "green": "#17855c",
    "red": "#c93f53",
    "purple": "#8257c9",
    "cyan": "#1b8ea3",
    "grey": "#7f8892",
}
"""Colours on white by name."""

DARK = {
    "ink": "#e8eaed",
    "muted": "#a3acb6",
    "axis": "#4a525b",
    "grid": "#292f35",
    "blue": "#6ea0ff",
    "orange": "#f0a04b",
    "green": "#46c795",
    "red": "#f07a88",
    "purple": "#b08cf0",
    "cyan": "#58c7da",
    "grey": "#88929d",
}
"""The same names on a dark page."""

CYCLE = ("blue", "orange", "green", "purple", "red", "cyan", "grey", "ink")
"""Names of the colours of series that have none of their own, in order."""

CONFIG: dict[str, Any] = {
    "background": None,
    "font": "sans-serif",
    "view": {"stroke": None},
    # The chart as a whole is described; thousands of marks are not read out.
    "mark": {"aria": False},
    "axis": {
        "aria": False,
        "domain": False,
        "ticks": False,
        "grid": False,
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "labelPadding": 4,
        "titlePadding": 6,
        "labelOverlap": True,
    },
    "axisX": {"titlePadding": 3, "domain": True, "domainColor": "var(--axis)"},
    "axisY": {"grid": True, "gridColor": "var(--grid)"},
    "legend": {
        "aria": False,
        "title": None,
        "orient": "top",
        "labelColor": "var(--muted)",
        "symbolType": "stroke",
        "symbolOpacity": 1,
        "symbolSize": 60,
        "symbolStrokeWidth": 2,
        "labelLimit": 0,
        "columnPadding": 8,
        "rowPadding": 1,
        "offset": 2,
    },
    "title": {"anchor": "start", "frame": "group", "color": "var(--ink)", "fontWeight": "bold", "offset": 6},
    "line": {"strokeJoin": "round", "strokeCap": "round"},
}
"""Style of a Vega-Lite specification, without sizes; colours as `charts` names them."""


def sizes(text: float) -> dict[str, Any]:
    """Return sizes that suit a text size, in points of a file or pixels of a page."""
    return {
        "axis": {"labelFontSize": text, "titleFontSize": text, "gridWidth": 0.07 * text, "domainWidth": 0.08 * text},
        "legend": {"labelFontSize": text},
        "title": {"fontSize": 1.15 * text},
        "line": {"strokeWidth": 0.15 * text},
        "rule": {"strokeWidth": 0.1 * text},
        "point": {"size": 0.4 * text * text},
        "text": {"fontSize": text},
    }
