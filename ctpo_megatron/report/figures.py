"""Draws the curves of a run with matplotlib: PNG files for READMEs and SVG for the report."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.report.panels import LIGHT, OVERVIEW, Line, Panel, panels
from ctpo_megatron.report.run_data import RunData, Series
from ctpo_megatron.tracking import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: Any = {  # matplotlib types its keys as a union of all their names
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LIGHT["axis"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": LIGHT["axis"],
    "ytick.color": LIGHT["axis"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.labelcolor": LIGHT["muted"],
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
}
_FEW = 60
"""Up to this many steps, each is drawn as a separate point or bar."""


def write_figures(run: RunData) -> dict[str, str]:
    """Write `figures/<panel>.png` and `figures/overview.png`; returns the SVG source of each panel that has data."""
    folder = RunPaths(run.directory).figures
    folder.mkdir(exist_ok=True)
    drawn = {panel.name: panel for panel in panels(run) if panel.has_data(run)}
    sources = {}
    with _style():
        for name, panel in drawn.items():
            _single(run, panel, titled=True).savefig(folder / f"{name}.png", dpi=150)
            sources[name] = _to_svg(_single(run, panel, titled=False), name)
        chosen = [drawn[name] for name in OVERVIEW if name in drawn]
        if chosen:
            _overview(run, chosen).savefig(folder / "overview.png", dpi=150)
    _remove_stale(folder, {*drawn, *(["overview"] if chosen else [])})
    return sources


def drawn(draw_into: Callable[[Axes], None], name: str) -> str:
    """The SVG source of one figure in the report's style; `name` makes its ids unique on the page."""
    with _style():
        figure, axes = _empty(titled=False)
        draw_into(axes)
        axes.tick_params(length=0, which="both", axis="y")
        _add_legend(axes)
        return _to_svg(figure, name)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def _remove_stale(folder: Path, names: set[str]) -> None:
    """A new report must not leave figures of metrics that no longer exist."""
    for path in folder.glob("*.png"):
        if path.stem not in names:
            path.unlink()


def _single(run: RunData, panel: Panel, titled: bool) -> Figure:
    figure, axes = _empty(titled)
    draw(axes, run, panel, titled)
    return figure


def _empty(titled: bool) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    # Fixed margins: the same axes in every figure, so that figures line up, without the cost of a layout solver.
    figure = Figure(figsize=(6.0, 3.1 if titled else 2.75))
    return figure, figure.add_axes((0.105, 0.15, 0.87, 0.65 if titled else 0.72))


def _overview(run: RunData, chosen: list[Panel]) -> Figure:
    from matplotlib.figure import Figure

    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, chosen, strict=False):
        draw(axes, run, panel, titled=True)
    for axes in grid.flat[len(chosen) :]:
        axes.remove()
    height = 3.1 * rows
    figure.subplots_adjust(
        left=0.62 / (4.6 * columns),
        right=1 - 0.15 / (4.6 * columns),
        bottom=0.5 / height,
        top=1 - 0.6 / height,
        wspace=0.27,
        hspace=0.62,
    )
    return figure


def draw(axes: Axes, run: RunData, panel: Panel, titled: bool) -> None:
    """Draw a panel into axes."""
    from matplotlib.ticker import MaxNLocator

    if panel.kind == "phases":
        _draw_phases(axes, run)
    else:
        _draw_lines(axes, run, panel)
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.margins(x=0.02)
    axes.tick_params(length=0, which="both", axis="y")
    if panel.log:
        _label_log_axis(axes)
    elif axes.get_ylim()[1] >= 1e4:
        _label_thousands(axes)
    rows = _add_legend(axes)
    if titled:
        axes.set_title(panel.title, loc="left", pad=22 if rows < 2 else 33)


def _add_legend(axes: Axes) -> int:
    """Add a legend above the axes, tighter with many entries, in two rows if one is too long. Returns the rows."""
    _, labels = axes.get_legend_handles_labels()
    if not labels:
        return 0
    many, rows = len(labels) > 4, 2 if len(labels) > 5 else 1
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.99),
        ncols=-(-len(labels) // rows),
        borderaxespad=0.1,
        columnspacing=0.7 if many else 1.2,
        handlelength=0.7 if many else 1.4,
        handletextpad=0.35 if many else 0.6,
        fontsize=7.5 if many else 8.5,
    )
    return rows


def _label_log_axis(axes: Axes) -> None:
    """Plain numbers at 1, 2, 5 over a short range; powers of ten over a long one."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(NullFormatter())
    if high / low < 300:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        _label_thousands(axes)


def _label_thousands(axes: Axes) -> None:
    """The margin next to the axis is fixed: five digits would push its label out of the figure."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1e3:g}k" if v >= 1e4 else f"{v:g}"))


def _draw_lines(axes: Axes, run: RunData, panel: Panel) -> None:
    several = len(panel.lines) > 1 or panel.reference is not None or panel.band is not None
    if panel.log:
        axes.set_yscale("log")
    if panel.band:
        _draw_band(axes, run, *panel.band)
    for line in panel.lines:
        series = line.series(run)
        if series is not None:
            _draw_line(axes, series, line, panel, labelled=several)
    if panel.reference and (value := run.setting(panel.reference[0])):
        axes.axhline(value, color=LIGHT["red"], linewidth=1, linestyle=(0, (4, 3)), label=panel.reference[1])
    if panel.limits and not panel.log:
        low, high = axes.get_ylim()
        axes.set_ylim(*(given if given is not None else found for given, found in zip(panel.limits, (low, high))))  # noqa: B905


def _draw_line(axes: Axes, series: Series, line: Line, panel: Panel, labelled: bool) -> None:
    few = len(series.steps) <= _FEW
    axes.plot(
        series.steps,
        series.values,
        color=LIGHT[line.colour],
        marker="o" if few else None,
        markersize=3.2,
        linestyle=(0, (3, 2)) if line.dashed else "-",
        label=line.label if labelled else None,
        clip_on=panel.log,  # points at 0 or 1 are not cut off
        zorder=3,
    )
    if panel.annotate:
        for index in {0, len(series.steps) - 1}:
            _annotate(axes, series, index, LIGHT[line.colour])


def _annotate(axes: Axes, series: Series, index: int, colour: str) -> None:
    """Write a value next to its point, on the side without the curve."""
    value = series.values[index]
    neighbour = series.values[1 if index == 0 else index - 1] if len(series.values) > 1 else value
    below = neighbour > value > 0.12
    axes.annotate(
        f"{value:.2f}",
        (series.steps[index], value),
        xytext=(0, -14 if below else 7),
        textcoords="offset points",
        ha="left" if index == 0 else "right",
        color=colour,
        fontweight="bold",
        fontsize=9,
    )


def _draw_band(axes: Axes, run: RunData, low: str, high: str) -> None:
    bottom, top = run.series(low), run.series(high)
    if bottom is None or top is None:
        return
    tops = dict(zip(top.steps, top.values, strict=True))
    points = [
        (step, value, tops[step]) for step, value in zip(bottom.steps, bottom.values, strict=True) if step in tops
    ]
    if points:
        steps, lows, highs = zip(*points, strict=True)
        axes.fill_between(steps, lows, highs, color=LIGHT["blue"], alpha=0.16, linewidth=0, label="min to max")


def _draw_phases(axes: Axes, run: RunData) -> None:
    """Stacked seconds per step: bars if there are few steps, else a stacked area."""
    steps = sorted({record["step"] for record in run.metrics if record.get("time/step") or record.get("time/rollout")})
    by_step = {record["step"]: record for record in run.metrics}
    stacked = {name: [by_step[step].get(f"time/{name}") or 0.0 for step in steps] for name in PHASES}
    totals = [by_step[step].get("time/step") or 0.0 for step in steps]
    stacked["other"] = [max(0.0, total - sum(parts)) for total, *parts in zip(totals, *stacked.values(), strict=True)]
    shown = {name: values for name, values in stacked.items() if sum(values) > 0.005 * (sum(totals) or 1)}
    colours = dict(
        zip(stacked, ("blue", "blue", "purple", "cyan", "green", "orange", "ink", "grey", "axis"), strict=True)
    )
    if len(steps) <= _FEW:
        base = [0.0] * len(steps)
        for name, values in shown.items():
            axes.bar(steps, values, 0.72, bottom=base, color=LIGHT[colours[name]], label=name, linewidth=0)
            base = [low + value for low, value in zip(base, values, strict=True)]
    else:
        palette = [LIGHT[colours[name]] for name in shown]
        axes.stackplot(steps, *shown.values(), colors=palette, labels=list(shown), linewidth=0)


def _to_svg(figure: Figure, name: str) -> str:
    """The `<svg>` element of a figure drawn in the colours of `LIGHT`; `name` makes its ids unique and stable."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    source = buffer.getvalue()
    source = source[source.index("<svg") :]
    source = re.sub(r' xmlns(:\w+)?="[^"]*"', "", source)
    # Twice, for width and height: the page sets the size, and the view box stays.
    for _ in ("width", "height"):
        source = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", source, count=1)
    source = source.replace("xlink:href", "href")
    source = re.sub(r"(\d\.\d\d)\d+", r"\1", source)
    for variable, colour in LIGHT.items():
        source = source.replace(colour, f"var(--{variable})")
    return re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", source)
