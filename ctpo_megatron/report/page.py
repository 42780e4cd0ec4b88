"""Writes report.html: one page that opens offline and shows results, learning curves and cost of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ctpo_megatron.base.files import write_text
from ctpo_megatron.base.redact import redacted
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.report.figures import write_figures
from ctpo_megatron.report.learning import Indicator, learning_checks
from ctpo_megatron.report.panels import RANK_PEAK, Panel, panels
from ctpo_megatron.report.rendering import rendered
from ctpo_megatron.report.run_data import RunData, Series
from ctpo_megatron.report.summary import LAST, Summary, conversation_uses, evaluation_label, summarize
from ctpo_megatron.report.trajectories import ratio_spec, sample_of_run
from ctpo_megatron.tracking import DUMP_FAILURES, duration, read_positions

ROUNDING = {"float32": 0.005, "bfloat16": 0.05}
"""Mean |sampler - trainer log-prob| in nats that rounding gives at most, by the precision of both; generous."""


@dataclass(frozen=True)
class Tile:
    """A headline number."""

    label: str
    value: str
    before: str = ""
    note: str = ""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` and `figures/*.png` from the files of the run directory; returns the path of the page."""
    from markupsafe import Markup

    run = RunData.load(run_dir)
    summary = summarize(run)
    shown = panels(run)
    figures = {name: Markup(source) for name, source in write_figures(run).items()}
    sample = sample_of_run(run.directory, run.config.get("objective"))
    return write_page(
        RunPaths(run.directory).report,
        "report.html.jinja",
        title=run.setting("run.name", run.directory.name),
        run=run,
        headline=headline(summary),
        tiles=list(tiles(run, summary)),
        figures=[(panel, figures[panel.name]) for panel in shown if panel.name in figures],
        left_out=list(left_out(run, shown, figures)),
        checks=list(checks(run)),
        rank_memory=rank_memory(run),
        facts=list(facts(run)),
        config=yaml.safe_dump(redacted(run.config), sort_keys=False),
        run_name=run.directory,
        sample=sample,
        ratio_spec=ratio_spec(sample.quantity),
    )


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Write a page from a template of `templates/` and its values; text in `values` is escaped. Returns `path`.

    Pages in the style of the report: one file that opens offline, light or dark, without requests to a server.
    """
    return write_text(path, rendered(template, **values))


def headline(summary: Summary) -> str:
    """The result in one sentence."""
    parts = []
    if summary.reward:
        parts.append(f"the sampled reward went from {summary.reward.start:.2f} to {summary.reward.end:.2f}")
    for source, change in summary.accuracy.items():
        parts.append(f"accuracy on {source} from {change.start:.2f} to {change.end:.2f}")
    steps = f"In {summary.steps} RL step{'' if summary.steps == 1 else 's'}"
    return f"{steps}, {' and '.join(parts)}." if parts else f"{steps}; no reward was recorded."


def tiles(run: RunData, summary: Summary) -> Iterator[Tile]:
    """The headline numbers that the run has."""
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
        yield Tile("Tokens", _count(summary.tokens), note=rate)
    if update := run.series("throughput/update_tokens_per_s"):
        flops, mfu = run.series("throughput/update_model_tflops_per_s"), run.series("throughput/update_mfu")
        parts = [f"{_median(flops):.3g} model TFLOP/s"] if flops else []
        parts += [f"MFU {_median(mfu):.1%}"] if mfu else []
        yield Tile("Update", f"{_count(_median(update))} tokens/s", note=", ".join(parts))
    if summary.peak_mib:
        yield Tile("Trainer memory", f"{summary.peak_mib / 1024:.3g} GiB", note="peak of the largest rank")


def _median(series: Series) -> float:
    return statistics.median(series.values)


def _count(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def left_out(run: RunData, shown: list[Panel], figures: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Figures that could not be drawn completely, with the missing metrics."""
    for panel in shown:
        absent = panel.absent(run)
        if panel.name not in figures:
            yield panel.title, absent or [f"{line.metric} (no positive value)" for line in panel.lines]
        elif absent and panel.kind == "lines":
            yield f"{panel.title} (in part)", absent


def checks(run: RunData) -> Iterator[Indicator]:
    """Rows of the health section: whether the run could learn, and numbers that should be zero or small."""
    yield from learning_checks(run)
    yield from _mismatch(run)
    yield from _noise(run)
    yield from _position_law(run)
    note = "nats in the first mini-batch; above 0.001 the pass for old log-probs and the training pass disagree"
    if run.setting("objective.anchor") != "behaviour":  # there the first ratio compares sampler and trainer
        yield from _largest(run, "pg_update/first_log_ratio_abs_max", "First log-ratio", 1e-3, note)
    for metric, label, note in (
        ("sandbox/infrastructure_error", "Sandbox failures", "tool calls the service could not serve"),
        ("rollout/group_retries", "Groups retried", "replaced as a whole, never trained on in part"),
        ("rollout/engine_restarts", "Engine restarts", ""),
        ("reward/failures", "Scorer failures", "exceptions: no verdict"),
        ("reward/timeouts", "Scorer timeouts", "reward.timeout_s: no verdict"),
        ("reward/crashes", "Scorer crashes", "its process died: no verdict"),
        ("reward/nones", "Scorer without an answer", "returned None: no verdict"),
        ("reward/not_finite", "Scorer not finite", "NaN or infinite: no verdict"),
    ):
        series = run.series(metric)
        if series:
            yield Indicator(label, f"{sum(series.values):,.0f}", sum(series.values) == 0, note)
    if failures := run.series("tracking/failures"):
        yield Indicator(
            "Tracker failures", f"{sum(failures.values):,.0f}", False, "calls of a tracker; the run continued"
        )
    if lost := run.series(DUMP_FAILURES):
        note = "their trajectories are not on disk (train.log says why); the run continued"
        yield Indicator("Dumps lost", f"{sum(lost.values):,.0f}", False, note)
    yield from _packing(run)
    nonfinite = run.series("tracking/nonfinite")
    count = sum(nonfinite.values) if nonfinite else 0.0
    yield Indicator("Non-finite metrics", f"{count:,.0f}", count == 0, "values that were NaN or infinite")


def rank_memory(run: RunData) -> list[tuple[str, list[str]]]:
    """Peak MiB of every trainer rank after the last step, eight ranks per row; empty for one rank and above 64."""
    steps = list(run.by_rank(RANK_PEAK).values())
    if not steps or not 1 < len(steps[-1]) <= 64:
        return []
    ranks, last = list(steps[-1]), steps[-1]
    rows = [ranks[start : start + 8] for start in range(0, len(ranks), 8)]
    return [(f"ranks {row[0]}–{row[-1]}", [f"{last[rank]:,.0f}" for rank in row]) for row in rows]


def _mismatch(run: RunData) -> Iterator[Indicator]:
    """Judged by the limit, or without one by the rounding of the precision. Two precisions are never good."""
    if not (largest := run.series("mismatch/log_prob_abs_max")):
        return
    value, label = f"{max(largest.values):.2g}", "Sampler–trainer mismatch"
    trainer, chosen = (run.setting(key) or "" for key in ("policy.dtype", "rollout.engine.dtype"))
    sampler = trainer if chosen == "auto" else chosen
    limit, means = run.setting("rollout.mismatch_limit"), run.series("mismatch/log_prob_abs_mean")
    rounding = ROUNDING.get(trainer)
    if trainer != sampler and run.setting("rollout.replay") is None:
        note = f"nats; policy.dtype is {trainer}, rollout.engine.dtype {sampler}: give both the same (auto)"
        yield Indicator(label, value, False, note)
    elif limit is not None:
        yield Indicator(label, value, max(largest.values) <= limit, f"nats; limit {limit:g}")
    elif means and rounding is not None:
        mean = max(means.values)
        note = f"nats; mean {mean:.2g}, {trainer} on both sides (policy.dtype, rollout.engine.dtype) has {rounding:g}"
        yield Indicator(label, value, mean <= rounding, f"{note} at most, unless a weight sync was lost")
    else:
        yield Indicator(label, value, None, "nats; no limit set")


def _noise(run: RunData) -> Iterator[Indicator]:
    longest = run.setting("rollout.max_response_tokens")
    if (crossing := run.series("mismatch/t_star")) and longest:
        note = f"where sampler–trainer noise alone leaves the clip window; a response has up to {longest:,}"
        yield Indicator("Noise position", f"token {min(crossing.values):,.3g}", min(crossing.values) >= longest, note)


def _position_law(run: RunData) -> Iterator[Indicator]:
    """Of the last mini-batch of the steps of `tracking.dump_every` in the second half of the run."""
    from ctpo_megatron.objective import PositionStats, fit_law, points_of_bins  # torch, which trackers do without

    records = [*read_positions(run.directory, "last")]
    late = [PositionStats.of_record(record) for record in records if 2 * record["step"] > records[-1]["step"]]
    if late and (law := fit_law(points_of_bins(sum(late, PositionStats.empty())))) is not None:
        note = f"{law.verdict}; last mini-batch, second half of the run (positions.jsonl)"
        yield Indicator("Position law", f"t^{law.exponent:.2f}", None, note)


def _packing(run: RunData) -> Iterator[Indicator]:
    if useful := run.series("packing/useful_token_fraction"):
        lowest = min(useful.values)
        yield Indicator("Useful tokens", f"{lowest:.1%}", lowest >= 0.95, "of the rows computed, in the worst step")
    if overhead := run.series("time/update_overhead_fraction"):
        note = "of the update outside of passes and optimizer, median"
        yield Indicator("Update overhead", f"{_median(overhead):.1%}", _median(overhead) < 0.1, note)
    if imbalance := run.series("packing/imbalance"):
        note = "largest over mean model FLOPs of the data-parallel ranks, median"
        yield Indicator("Rank imbalance", f"{_median(imbalance):.3f}", _median(imbalance) < 1.1, note)


def _largest(run: RunData, metric: str, label: str, limit: float | None, note: str) -> Iterator[Indicator]:
    series = run.series(metric)
    if series:
        largest = max(series.values)
        yield Indicator(label, f"{largest:.2g}", None if limit is None else largest <= limit, note)


def facts(run: RunData) -> Iterator[tuple[str, str]]:
    """The most important settings."""
    get = run.setting
    prompts, samples, mini = (
        get(key, "?") for key in ("rollout.prompts_per_step", "rollout.samples_per_prompt", "policy.mini_batch_prompts")
    )
    yield "Objective", f"{get('objective.preset', '?')}, {get('objective.anchor', '?')} anchor"
    yield "Model", str(get("model.path", "?"))
    yield "Training data", ", ".join(get("data.train", ()) or ("?",))
    if get("data.eval"):
        yield "Evaluation data", ", ".join(get("data.eval"))
    yield "Batch", f"{prompts} prompts × {samples} samples, mini-batches of {mini} prompts"
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
