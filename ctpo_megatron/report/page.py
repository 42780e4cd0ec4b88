"""Writes report.html: one page that opens offline and shows results, learning curves and cost of one run or several."""

from __future__ import annotations

import base64
import gzip
import importlib.metadata
import json
import logging
import os
import statistics
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ctpo_megatron.base.files import aside, read_mapping, write_text
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.text import printable, redacted
from ctpo_megatron.report.charts import Chart, Spec, for_page, style
from ctpo_megatron.report.comparison import Comparison, in_short, page_values
from ctpo_megatron.report.figures import charts_by_position, charts_by_step, figures, write_figures
from ctpo_megatron.report.health import checks
from ctpo_megatron.report.run_data import RunData, Series
from ctpo_megatron.report.summary import LAST, StepCost, Summary, conversation_uses, evaluation_label, summarize
from ctpo_megatron.report.theme import DARK, LIGHT
from ctpo_megatron.report.trajectories.ratio import ratio_spec
from ctpo_megatron.report.trajectories.selection import Selection, TrajectoryFilters, matching, sample_of_run
from ctpo_megatron.tracking import duration

if TYPE_CHECKING:
    from jinja2 import Environment

log = logging.getLogger(__name__)
_TEMPLATES = Path(__file__).parent / "templates"
_PAGE_TEXT = 12
"""Text size on the page, pixels."""


@dataclass(frozen=True)
class Tile:
    """A headline number."""

    label: str
    value: str
    before: str = ""
    note: str = ""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` and `figures/*.png` from the files of the run directory; returns the path of the page."""
    alone = Comparison.load([run_dir])
    [run] = alone.runs
    charts = (charts_by_step(alone), charts_by_position(alone))
    write_figures(run, [*charts[0], *charts[1]])
    return write_text(RunPaths(run.directory).report, _page(alone, *charts))


def write_trajectories_page(run_dir: Path, filters: TrajectoryFilters, most: int) -> tuple[Path | None, Selection]:
    """Write `trajectories.html` with at most `most` trajectories that pass; returns its path, None without a match.

    Raises DamagedFileError for a configuration that cannot be read.
    """
    config, paths = read_mapping(RunPaths(run_dir).config), RunPaths(run_dir)
    found = matching(run_dir, filters, most, config.get("objective"))
    if not found.count:
        return None, found
    page = _rendered(
        "trajectory_page.html.jinja",
        [],
        title=(config.get("run") or {}).get("name", run_dir.name),
        headline=f"{found.count:,} of {found.searched:,} trajectories match: {filters}.",
        chosen="Newest step first.",
        run_name=run_dir,
        sample=found,
        ratio_spec=ratio_spec(found.quantity),
    )
    return write_text(paths.trajectories_page, page), found


def write_comparison(compared: Comparison, path: Path) -> Path:
    """Write the page of `write_report` for several runs together; returns `path`, which is no file of a run directory.

    Raises DamagedFileError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_text(path, _page(compared, charts_by_step(compared), charts_by_position(compared)))


def _page(compared: Comparison, by_step: Sequence[Chart], by_position: Sequence[Chart]) -> str:
    one = compared.runs[0] if len(compared.runs) == 1 else None
    values = _of_run(one, {chart.name for chart in by_step}) if one else page_values(compared)
    values |= {"by_step": by_step, "by_position": by_position, "one": one}
    return _rendered("report.html.jinja", [*by_step, *by_position], **values)


def _of_run(run: RunData, drawn: Collection[str]) -> dict[str, Any]:
    """Return what the page shows of one run alone. drawn: names of its figures."""
    summary = summarize(run)
    sample = sample_of_run(run.directory, run.config.get("objective"))
    left_out = [row for row in figures([run]) if row.name not in drawn and not row.optional]
    return {
        "title": run.setting("run.name", run.directory.name),
        "headline": headline(summary),
        "tiles": list(tiles(run, summary)),
        "left_out": [(row.title, [line.metric for line in row.lines]) for row in left_out],
        "checks": list(checks(run)),
        "cost": StepCost.of(run),
        "facts": list(facts(run)),
        "config": yaml.safe_dump(redacted(run.config), sort_keys=False),
        "run_name": run.directory,
        "sample": sample,
        "chosen": "Best and worst of groups at the first and last step, and evaluation examples.",
        "ratio_spec": ratio_spec(sample.quantity),
    }


def _rendered(template: str, charts: Iterable[Chart], **values: Any) -> str:
    """Fill a template: one file that opens offline, light or dark, without requests; text in `values` is escaped.

    charts: drawn where a `<figure data-chart>` has their name. Raises jinja2.UndefinedError for a missing value.
    """
    from markupsafe import Markup

    parts = {"chart_data": Markup(chart_json(charts)), "bundle": Markup(bundle())}
    colours = {"light": LIGHT, "dark": DARK}
    return _environment().get_template(template).render(colours=colours, **parts, **values)


@cache
def _environment() -> Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: Any) -> Any:
    """Have texts of models and data show what would hide or reorder what stands next to it."""
    return type(value)(printable(value, lines=True)) if isinstance(value, str) else value


def chart_json(charts: Iterable[Chart]) -> str:
    """Return what the script of the page draws, safe inside of a `<script>` element: style, and specifications."""
    drawn: dict[str, Spec] = {chart.name: for_page(chart) for chart in charts}
    data = {"config": style(_PAGE_TEXT), "charts": drawn}
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def bundle() -> str:
    """Return Vega, Vega-Lite, Vega-Embed and the interpreter of their expressions: JavaScript, gzip, base64.

    To make it takes two CPU-seconds, and it is the same for all pages: the user's cache folder keeps it.
    """
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ctpo-megatron"
    path = cache_dir / f"vega-{importlib.metadata.version('vl-convert-python')}.js.gz"
    try:
        content = path.read_bytes()
        gzip.decompress(content)  # raises where it is damaged
    except (OSError, EOFError, zlib.error):
        content = _made_bundle()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside(path) as new:
                new.write_bytes(content)
        except OSError as error:  # a home that cannot be written
            log.debug("%s: not kept for the next report", error)
    return base64.b64encode(content).decode("ascii")


def _made_bundle() -> bytes:
    import vl_convert

    source = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return gzip.compress(source.encode(), 9, mtime=0)


def headline(summary: Summary) -> str:
    """Return the result in one sentence."""
    parts = []
    if summary.reward:
        parts.append(f"the sampled reward went from {summary.reward.start:.2f} to {summary.reward.end:.2f}")
    for source, change in summary.accuracy.items():
        parts.append(f"accuracy on {source} from {change.start:.2f} to {change.end:.2f}")
    steps = f"In {summary.steps} RL step{'' if summary.steps == 1 else 's'}"
    return f"{steps}, {' and '.join(parts)}." if parts else f"{steps}; no reward was recorded."


def tiles(run: RunData, summary: Summary) -> Iterator[Tile]:
    """Yield the headline numbers that the run has."""
    if summary.reward:
        note = f"first step → mean of the last {LAST}"
        yield Tile("Reward", f"{summary.reward.end:.2f}", f"{summary.reward.start:.2f}", note)
    for source, change in list(summary.accuracy.items())[:2]:
        yield Tile("Accuracy", f"{change.end:.2f}", f"{change.start:.2f}", f"{source}, {evaluation_label(run)}")
    if summary.tool_use:
        note = "trajectories with a successful call"
        yield Tile("Tool use", f"{summary.tool_use.end:.0%}", f"{summary.tool_use.start:.0%}", note)
    if summary.wall_s:
        cpu = f"{duration(summary.cpu_s)} CPU" if summary.cpu_s else ""
        yield Tile("Time", duration(summary.wall_s), note=cpu)
    if summary.tokens:
        rate = f"{summary.tokens_per_second:,.0f} per second" if summary.tokens_per_second else ""
        yield Tile("Tokens", in_short(summary.tokens), note=rate)
    if update := run.series("throughput/update_tokens_per_s"):
        flops, mfu = run.series("throughput/update_model_tflops_per_s"), run.series("throughput/update_mfu")
        parts = [f"{_median(flops):.3g} model TFLOP/s"] if flops else []
        parts += [f"MFU {_median(mfu):.1%}"] if mfu else []
        yield Tile("Update", in_short(_median(update)), note=", ".join(["tokens per second", *parts]))
    if summary.peak_mib:
        yield Tile("Trainer memory", f"{summary.peak_mib / 1024:.3g}", note="GiB, peak of the largest rank")


def _median(series: Series) -> float:
    return statistics.median(series.values)


def facts(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield the most important settings."""
    get = run.setting
    prompts, samples, mini = (
        get(key, "?") for key in ("rollout.prompts_per_step", "rollout.samples_per_prompt", "policy.mini_batch_prompts")
    )
    passes = f", {many} passes" if (many := get("policy.passes_per_batch", 1)) != 1 else ""
    yield "Objective", _objective(run)
    yield "Anchor", f"{get('objective.anchor', '?')}, correction: {get('objective.correction.level', '?')}"
    yield "Model", str(get("model.path", "?"))
    files = [
        each if isinstance(each, str) else f"{each['path']} (weight {each['weight']:g})"
        for each in get("data.train", ())
    ]
    yield "Training data", ", ".join(files or ("?",))
    if get("data.eval"):
        yield "Evaluation data", ", ".join(get("data.eval"))
    yield "Batch", f"{prompts} prompts × {samples} samples, mini-batches of {mini} prompts{passes}"
    yield "Learning rate", f"{get('policy.optimizer.lr', '?')} ({get('policy.optimizer.schedule', '?')})"
    yield "Sampling", f"temperature {get('rollout.temperature', '?')}, up to {get('rollout.max_turns', '?')} turns"
    if epoch := run.series("sft/epoch"):
        yield "SFT conversations", conversation_uses(epoch.values[-1])
    yield "Seed", str(get("run.seed", "?"))
    if started := run.environment.get("started"):
        yield "Started", str(started)
    if python := run.environment.get("python"):
        yield (
            "Machine",
            f"{run.environment.get('platform', '?')}, {run.environment.get('cpus', '?')} CPUs, Python {python}",
        )
    if packages := run.environment.get("packages"):
        yield "Versions", ", ".join(f"{name} {version}" for name, version in packages.items())


def _objective(run: RunData) -> str:
    """Return it as the run has recorded it, since presets may change; older runs have recorded the name alone."""
    recorded = run.environment.get("objective")
    summary = recorded.get("summary") if isinstance(recorded, dict) else None
    return str(summary or run.setting("objective.preset", "?")).removeprefix("Objective: ")
