"""The figures of a report: what the page draws, and their files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.base.files import aside, write_text
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.report.charts import COLUMN, HEIGHT, SCHEMA, Chart, Spec, file_config, save_charts, still
from ctpo_megatron.report.comparison import Comparison
from ctpo_megatron.report.metric_charts import comparison_charts, panel_chart
from ctpo_megatron.report.panels import OVERVIEW, compared_panels, panels
from ctpo_megatron.report.paper_figures import law_charts, outcome_charts, position_charts
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.theme import DARK, LIGHT, coloured, variable

SCREEN = 200
"""Pixels an inch of the files of each report; a paper has `save_figures`."""


@dataclass(frozen=True)
class Figure:
    """charts: what it shows, by label; of several, one at a time."""

    name: str
    title: str
    caption: str
    charts: dict[str, Chart]

    @classmethod
    def of(cls, chart: Chart) -> Figure:
        """Of one chart."""
        return cls(chart.name, chart.title, chart.caption, {chart.title: chart})


def figures_of(compared: Comparison) -> tuple[list[Figure], list[Figure]]:
    """Figures by step, and by position in the response; each with data in at least one run."""
    runs, groups = compared.runs, compared.groups
    if len(runs) == 1:
        found = [Figure.of(panel_chart(panel, runs[0])) for panel in panels(runs[0]) if panel.has_data(runs[0])]
    else:
        found = [
            Figure(panel.name, panel.title, panel.caption, dict(comparison_charts(panel, groups)))
            for panel in compared_panels(runs)
        ]
    by_position = [Figure.of(chart) for chart in (*law_charts(groups), *position_charts(groups))]
    return [figure for figure in found if figure.charts], by_position


def charts_of(figures: Iterable[Figure]) -> list[Chart]:
    return list(itertools.chain.from_iterable(figure.charts.values() for figure in figures))


def write_figures(run: RunData, figures: Sequence[Figure]) -> None:
    """Write `figures/<name>.png` of a run and `figures/overview.png`; files of an earlier report are removed."""
    import vl_convert

    folder = RunPaths(run.directory).figures
    charts = {chart.name: chart for chart in charts_of(figures)}
    written = {path.name for path in save_charts(charts.values(), folder, ("png",), SCREEN)}
    if chosen := [charts[name] for name in OVERVIEW if name in charts]:
        spec = coloured(_together(chosen, 3), LIGHT)
        with aside(folder / "overview.png") as new:
            new.write_bytes(vl_convert.vegalite_to_png(spec, ppi=SCREEN))
        written.add("overview.png")
    for path in folder.glob("*.png"):
        if path.name not in written:
            path.unlink()


def save_figures(compared: Comparison, folder: Path) -> list[Path]:
    """Write every figure of a report as PNG, SVG and PDF, fit for a paper; returns the paths.

    Of one run also `overview.svg` and, for phones, `overview-narrow.svg`: they follow the reader's light or dark theme,
    as in a README. Raises DamagedFileError.
    """
    by_step, by_position = figures_of(compared)
    charts = charts_of([*by_step, *by_position])
    written = save_charts([*charts, *outcome_charts(compared.groups)], folder)
    found = {chart.name: chart for chart in charts}
    if chosen := [found[name] for name in OVERVIEW if name in found and len(compared.runs) == 1]:
        for name, columns in (("overview", 3), ("overview-narrow", 1)):
            written.append(write_text(folder / f"{name}.svg", _adaptive(chosen, columns)))
    return written


def _adaptive(charts: Sequence[Chart], columns: int) -> str:
    """SVG whose colours are variables, with a style for either theme of the reader."""
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(_together(charts, columns) | {"background": variable("ground")})
    light, dark = (
        "".join(f"--{name}:{colour};" for name, colour in ({"ground": ground} | theme).items())
        for ground, theme in (("#fff", LIGHT), ("#0d1117", DARK))
    )
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    return svg.replace(">", f">{style}", 1) + "\n"


def _together(charts: Sequence[Chart], columns: int) -> Spec:
    """Several charts in one specification, colours as variables."""
    width, height = COLUMN - 40, HEIGHT - 40
    parts = []
    for chart in charts:
        part = still(chart.spec) | {"width": width, "height": height, "title": chart.title}
        # Here the signal `height` is of the whole, and not of a part.
        parts.append(json.loads(json.dumps(part).replace('{"expr": "height"}', str(height))))
    apart = {"scale": {"color": "independent", "strokeDash": "independent"}}
    return {
        "$schema": SCHEMA,
        "description": ", ".join(chart.title for chart in charts),
        "config": file_config(),
        "concat": parts,
        "columns": columns,
        "resolve": apart,
        "spacing": 14,
    }
