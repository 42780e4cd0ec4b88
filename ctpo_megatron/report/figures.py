"""The figures of a report: what the page draws, and their files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import aside
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.report.charts import COLUMN, HEIGHT, Chart, for_file, save_charts
from ctpo_megatron.report.groups import RunGroup, groups_of
from ctpo_megatron.report.metric_charts import comparison_charts, panel_chart
from ctpo_megatron.report.panels import OVERVIEW, Panel, compared_panels, panels
from ctpo_megatron.report.paper_figures import law_charts, outcome_charts
from ctpo_megatron.report.position_charts import position_charts
from ctpo_megatron.report.run_data import RunData

SCREEN = 200
"""Pixels an inch of the files of each report; a paper has `save_figures`."""


@dataclass(frozen=True)
class Figure:
    """charts: what it shows, by label; of several, one at a time."""

    name: str
    title: str
    caption: str
    charts: dict[str, Chart]


def figures_of(runs: Sequence[RunData], groups: Sequence[RunGroup]) -> tuple[list[Figure], list[Figure]]:
    """Figures by step, and by position in the response; each with data in at least one run."""
    if len(runs) == 1:
        found = [_alone(panel_chart(panel, runs[0])) for panel in panels(runs[0]) if panel.has_data(runs[0])]
    else:
        found = [_compared(panel, groups) for panel in compared_panels(runs)]
    by_position = [_alone(chart) for chart in (*law_charts(groups), *position_charts(groups))]
    return [figure for figure in found if figure.charts], by_position


def write_figures(run: RunData, figures: Sequence[Figure]) -> None:
    """Write `figures/<name>.png` of a run and `figures/overview.png`; files of an earlier report are removed."""
    folder = RunPaths(run.directory).figures
    charts = {figure.name: chart for figure in figures for chart in figure.charts.values()}
    written = {path.name for path in save_charts(charts.values(), folder, ("png",), SCREEN)}
    if chosen := [charts[name] for name in OVERVIEW if name in charts]:
        written.add(write_overview(chosen, folder / "overview.png").name)
    for path in folder.glob("*.png"):
        if path.name not in written:
            path.unlink()


def save_figures(run_dirs: Sequence[Path], folder: Path) -> list[Path]:
    """Write every figure of a report as PNG, SVG and PDF, fit for a paper; returns the paths.

    Raises FileNotFoundError for a directory that is no run, DamagedFileError.
    """
    runs = [RunData.load(directory) for directory in run_dirs]
    groups = groups_of(runs)
    by_step, by_position = figures_of(runs, groups)
    charts = [chart for figure in (*by_step, *by_position) for chart in figure.charts.values()]
    return save_charts([*charts, *outcome_charts(groups)], folder)


def write_overview(charts: Sequence[Chart], path: Path, columns: int = 3) -> Path:
    """Write several charts as one PNG."""
    import vl_convert

    with aside(path) as new:
        new.write_bytes(vl_convert.vegalite_to_png(_together(charts, columns), ppi=SCREEN))
    return path


def _together(charts: Sequence[Chart], columns: int) -> dict[str, Any]:
    size = {"width": COLUMN - 40, "height": HEIGHT - 40}
    rest = ("$schema", "config", "autosize", "width", "height", "description")
    parts = [
        {name: part for name, part in for_file(chart, titled=True).items() if name not in rest} for chart in charts
    ]
    whole = for_file(Chart("overview", "", ", ".join(chart.title for chart in charts), {}))
    apart = {"scale": {"color": "independent", "strokeDash": "independent"}}
    del whole["width"], whole["height"], whole["autosize"]
    return whole | {"concat": [size | part for part in parts], "columns": columns, "resolve": apart, "spacing": 14}


def _alone(chart: Chart) -> Figure:
    return Figure(chart.name, chart.title, chart.caption, {chart.title: chart})


def _compared(panel: Panel, groups: Sequence[RunGroup]) -> Figure:
    return Figure(panel.name, panel.title, panel.caption, dict(comparison_charts(panel, groups)))
