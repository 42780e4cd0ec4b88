"""The result of a run, and what its steps cost: seconds and speed by phase, who waits. Also as a terminal table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.terminal import Terminal
from ctpo_megatron.report.learning import Best, Trend, best_step, decline_of
from ctpo_megatron.report.run_data import ACCURACY, RunData, Series
from ctpo_megatron.tracking import PHASES, TimeSpent, duration

COMPUTING = ("old_log_probs", "update")
"""Phases in which the trainer's devices compute."""
REST = "rest"
"""What no phase has: logging, the stop signal, weights released."""


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """seconds: wall, mean of a step. share: of the step. Speeds are medians over steps, None where not recorded.

    tokens_per_s: of the phase's own tokens. tflops_per_s: model TFLOP/s. mfu: share of the devices' peak.
    """

    name: str
    seconds: float
    share: float
    tokens_per_s: float | None = None
    tflops_per_s: float | None = None
    mfu: float | None = None


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of the RL steps of a run. step_s: wall seconds of a step, mean. phases: largest first, they add up to it.

    samples_per_s: trajectories that were sampled for training. tokens_per_s: prompts and observations included.
    trainer_waits: share of the time outside of `COMPUTING`. engines_idle: share of the time, mean over engines, in
    which nothing is in flight on an engine; None where it was not measured.
    """

    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    phases: list[PhaseCost]
    trainer_waits: float
    engines_idle: float | None

    @classmethod
    def of(cls, run: RunData) -> Self | None:
        """None for a run without a timed step."""
        steps = [record for record in run.metrics if record["step"] > 0 and record.get("time/step")]
        if not steps:
            return None
        step_s = fmean(record["time/step"] for record in steps)
        seconds = {name: fmean(record.get(f"time/{name}") or 0.0 for record in steps) for name in _timed_phases(run)}
        seconds[REST] = max(0.0, step_s - sum(seconds.values()))
        largest = sorted((name for name in seconds if seconds[name]), key=lambda name: -seconds[name])
        tokens = [record["tokens/total"] for record in steps if record.get("tokens/total")]
        idle = [record["rollout/engines_idle"] for record in steps if "rollout/engines_idle" in record]
        samples = run.setting("rollout.prompts_per_step", 0) * run.setting("rollout.samples_per_prompt", 0)
        return cls(
            step_s,
            samples / step_s,
            fmean(tokens) / step_s if tokens else None,
            [PhaseCost(name, seconds[name], seconds[name] / step_s, *_speed(run, name)) for name in largest],
            1 - sum(seconds.get(name, 0.0) for name in COMPUTING) / step_s,
            fmean(idle) if idle else None,
        )

    def mfu(self, phase: str) -> float | None:
        """Of a phase; None where it is not known."""
        return next((each.mfu for each in self.phases if each.name == phase), None)


def _timed_phases(run: RunData) -> list[str]:
    """Whatever was timed; other times lack the CPU seconds that a phase has."""
    timed = [name.removeprefix("time/") for name in run.names if name.startswith("time/")]
    return [name for name in timed if f"time/{name}_cpu" in run.names and name != "step"]


def _speed(run: RunData, phase: str) -> Sequence[float | None]:
    names = (f"throughput/{phase}_{unit}" for unit in ("tokens_per_s", "model_tflops_per_s", "mfu"))
    return [median(found.values) if (found := run.series(name)) else None for name in names]


REPORT = "report"
"""The last stage."""
_WORTH_SAYING = 1.1
"""Times as fast that a run could be, for its summary to say so."""
LAST = 5
"""Steps at the end of a run that are averaged, because one step's reward is too noisy."""


@dataclass(frozen=True)
class Change:
    """A quantity at the start and at the end of a run."""

    start: float
    end: float


@dataclass(frozen=True)
class Summary:
    """The figures of a run; None where the run directory lacks them.

    trends: reward and accuracies at the start and lately; best: the best evaluated step.
    reward: first RL step, and the mean of the last five.
    accuracy: per data source, the first and the last evaluation.
    tool_use: share of trajectories with a successful call, first and last RL step.
    peak_mib: largest peak memory of a trainer rank. sft_epoch: mean uses of a conversation by SFT.
    phases: seconds over all RL steps; stages: of each stage of the run. overlap: how many times as fast steps could be
    at most if the next batch were sampled meanwhile; None for a run that does so, or trains on a recording.
    """

    steps: int
    reward: Change | None
    accuracy: dict[str, Change]
    tool_use: Change | None
    tokens: float | None
    tokens_per_second: float | None
    peak_mib: float | None
    sft_epoch: float | None
    phases: dict[str, TimeSpent]
    stages: dict[str, TimeSpent]
    report: Path | None
    trends: list[Trend]
    best: Best | None
    overlap: float | None = None

    @property
    def wall_s(self) -> float | None:
        """Wall seconds of the run: of its stages, else of its RL steps; None if neither was timed.

        Without the stage that writes the report, which shows this number, too.
        """
        total = sum(spent.wall for name, spent in self.stages.items() if name != REPORT)
        return total or (self.phases["step"].wall if "step" in self.phases else None)

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds of the same, of all processes if measured; None if not recorded."""
        total = sum(spent.cpu_all or spent.cpu for name, spent in self.stages.items() if name != REPORT)
        return total or (self.phases["step"].cpu if "step" in self.phases else None) or None


def summarize(run: RunData | Path) -> Summary:
    """Compute the summary from a run directory."""
    run = run if isinstance(run, RunData) else RunData.load(run)
    report = RunPaths(run.directory).report
    tokens, wall = run.series("tokens/total"), run.series("time/step")
    memory, epoch = run.series("memory/trainer_peak_mib"), run.series("sft/epoch")
    total_tokens = sum(tokens.values) if tokens else None
    return Summary(
        steps=run.last_step,
        reward=_change(run.series("reward/mean"), LAST),
        accuracy=_accuracies(run),
        tool_use=_change(run.series("rollout/tool_use"), 1),
        tokens=total_tokens,
        tokens_per_second=total_tokens / sum(wall.values) if total_tokens and wall and sum(wall.values) else None,
        peak_mib=max(memory.values) if memory else None,
        sft_epoch=epoch.values[-1] if epoch else None,
        phases=_phases(run),
        stages=run.stages,
        report=report if report.exists() else None,
        trends=[*decline_of(run.metrics, run.setting("rollout.prompts_per_step", 1)).trends().values()],
        best=best_step(run),
        overlap=_overlap(run),
    )


def _overlap(run: RunData) -> float | None:
    rollout, step = run.series("time/rollout"), run.series("time/step")
    ahead = run.setting("rollout.max_staleness", 0) or run.setting("rollout.lag", None)
    if ahead or run.setting("rollout.replay", None) or rollout is None or step is None:
        return None
    whole, sampling = sum(step.values), sum(rollout.values)
    return whole / max(sampling, whole - sampling) if whole else None


def print_summary(run_dir: Path, console: Console | None = None) -> None:
    """Print the summary of a run directory as a table."""
    run = RunData.load(run_dir)
    summary = summarize(run)
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for label, justify in (("", "left"), ("start", "right"), ("end", "right"), ("change", "right"), ("", "left")):
        table.add_column(label, justify=justify)  # type: ignore[arg-type]
    _add_change(table, "sampled reward", summary.reward, f"first step → mean of the last {LAST}")
    for source, change in summary.accuracy.items():
        _add_change(table, escape(f"accuracy, {source}"), change, f"{evaluation_label(run)}, held-out prompts")
    _add_change(table, "tool use", summary.tool_use, "trajectories with a successful call")
    times = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for label in ("time", "wall", "CPU, all", "CPU, trainer"):
        times.add_column(label, justify="left" if label == "time" else "right")
    _add_times(times, summary)
    grid = Table.grid(padding=(1, 0))
    for part in (table, times, _closing(summary)):
        grid.add_row(part)
    name = escape(str(run.setting("run.name", run.directory.name)))
    (console or Terminal()).print(Panel(grid, title=f"[bold]{name}[/]", border_style="dim", expand=False))


def conversation_uses(epoch: float) -> str:
    """Say how often SFT used each conversation; epoch: the mean. No count differs from another by more than 1."""
    uses = f"{epoch:.3g}"
    return f"each used {'once' if uses == '1' else f'{uses} times'} on average"


def evaluation_label(run: RunData) -> str:
    """Return how evaluations were sampled: greedy, or the temperature."""
    temperature = run.setting("eval.temperature", 0.0)
    return "greedy" if not temperature else f"temperature {temperature:g}"


def _change(series: Series | None, last: int) -> Change | None:
    if series is None:
        return None
    tail = series.values[-last:]
    return Change(series.values[0], sum(tail) / len(tail))


def _accuracies(run: RunData) -> dict[str, Change]:
    changes = {}
    for name in run.accuracy_names:
        match, change = ACCURACY.fullmatch(name), _change(run.series(name), 1)
        if match and change:
            changes[match["source"]] = change
    return changes


def _phases(run: RunData) -> dict[str, TimeSpent]:
    phases = {}
    for name in (*PHASES, "step"):
        wall, cpu = run.series(f"time/{name}"), run.series(f"time/{name}_cpu")
        if wall:
            phases[name] = TimeSpent(sum(wall.values), sum(cpu.values) if cpu else 0.0)
    return phases


def _add_change(table: Table, label: str, change: Change | None, note: str) -> None:
    if change is None:
        return
    delta = change.end - change.start
    colour = "green" if delta > 0 else "red" if delta < 0 else "dim"
    table.add_row(
        label, f"{change.start:.3f}", f"[bold]{change.end:.3f}[/]", f"[{colour}]{delta:+.3f}[/]", f"[dim]{note}[/]"
    )


def _add_times(table: Table, summary: Summary) -> None:
    for name, spent in summary.stages.items():
        everything = duration(spent.cpu_all) if spent.cpu_all else "–"
        table.add_row(name, duration(spent.wall), everything, duration(spent.cpu))
        if name == "rl":
            for phase, seconds in summary.phases.items():
                if phase != "step":
                    table.add_row(f"[dim]  {phase}[/]", f"[dim]{duration(seconds.wall)}[/]", "", _dim_cpu(seconds))
    if not summary.stages:
        for phase, seconds in summary.phases.items():
            table.add_row(phase, duration(seconds.wall), "", _dim_cpu(seconds))


def _dim_cpu(seconds: TimeSpent) -> str:
    return f"[dim]{duration(seconds.cpu)}[/]" if seconds.cpu else "[dim]–[/]"


def _closing(summary: Summary) -> str:
    parts = [f"{summary.steps} RL steps"]
    if summary.sft_epoch:
        parts.append(f"SFT conversations: {conversation_uses(summary.sft_epoch)}")
    if summary.tokens:
        parts.append(f"{summary.tokens:,.0f} tokens")
    if summary.tokens_per_second:
        parts.append(f"{summary.tokens_per_second:,.0f} tokens/s")
    if summary.peak_mib:
        parts.append(f"{summary.peak_mib:,.0f} MiB a trainer rank")
    if summary.wall_s:
        parts.append(f"{duration(summary.wall_s)} in all")
    lines = ["  ·  ".join(parts)]
    if summary.overlap and summary.overlap > _WORTH_SAYING:
        faster = f"at most {summary.overlap:.2g} times as fast"
        lines.append(f"rollout.max_staleness=1 would sample the next batch meanwhile: {faster}")
    lines += [f"[red]warning: {trend}, by more than noise explains[/]" for trend in summary.trends if trend.worse]
    if (best := summary.best) and best.value > best.last:
        lines.append(
            f"best step: {best.step}, {best.measure} {best.value:.3g} ({best.last:.3g} at the end): {best.where}"
        )
    if summary.report:
        lines.append(f"report: [bold]{summary.report}[/]")
    return "\n".join(lines)
