"""Renders the display from its state alone: the live panel and the plain lines."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PHASES = ("wait_rollout", "rollout", "reward", "old_log_probs", "update", "publish", "eval", "checkpoint")
_PHASE_COLOURS = ("blue", "blue", "magenta", "cyan", "green", "yellow", "bright_black", "bright_black")
_BARS = "▁▂▃▄▅▆▇█"
_ROWS = 6
_ACCURACY = re.compile(r"val/(?P<source>.+)/acc/(?P<of>[a-z]+@\d+)")


@dataclass
class State:
    """State of the display: earlier stages, progress of the current one, and the steps so far.

    evaluation: step and lines of the latest one; no lines before the first.
    """

    title: str
    total_steps: int
    stage: str = ""
    entered: float = 0.0
    passed: list[tuple[str, float]] = field(default_factory=list)
    done: int = 0
    total: int = 0
    detail: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    evaluation: tuple[int, list[str]] = (0, [])
    began: float = field(default_factory=time.monotonic)

    def enter(self, stage: str) -> None:
        """Begin a stage; no effect if it is the current one."""
        if stage == self.stage:
            return
        now = time.monotonic()
        if self.stage:
            self.passed.append((self.stage, now - self.entered))
        self.stage, self.entered, self.done, self.total, self.detail = stage, now, 0, 0, {}

    def progress(self, done: int, total: int, metrics: Mapping[str, float]) -> None:
        """Set the progress within the stage."""
        self.done, self.total, self.detail = done, total, dict(metrics)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a finished RL step."""
        self.steps.append((step, dict(metrics)))
        self.done, self.total = step, self.total_steps

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last RL step at the pace of the latest ten, or of the stage's progress; None if unknown."""
        if self.stage == "rl" and self.steps:
            walls = [metrics["time/step"] for _, metrics in self.steps[-10:] if "time/step" in metrics]
            return sum(walls) / len(walls) * max(0, self.total_steps - self.steps[-1][0]) if walls else None
        if self.done and self.total:
            return (time.monotonic() - self.entered) / self.done * (self.total - self.done)
        return None


def duration(seconds: float) -> str:
    """A readable duration: 8.3s, 2m05s, 3h07m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values as bars between the smallest and the largest of them."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((value - low) / span * len(_BARS)))] for value in shown)


def plain_step(state: State) -> str:
    """One line for the newest step."""
    step, metrics = state.steps[-1]
    parts = [f"[rl] step {step:>{len(str(state.total_steps))}}/{state.total_steps}"]
    for label, name, form in _COLUMNS:
        if name in metrics:
            parts.append(f"{label} {format(metrics[name], form)}")
    phases = " ".join(f"{p} {metrics[f'time/{p}']:.1f}" for p in PHASES if f"time/{p}" in metrics)
    if "time/step" in metrics:
        parts.append(f"{metrics['time/step']:.1f}s" + (f" ({phases})" if phases else ""))
    if state.eta_s is not None:
        parts.append(f"eta {duration(state.eta_s)}")
    return "  ".join(parts)


def accuracy_lines(metrics: Mapping[str, float], first: Mapping[str, float]) -> list[str]:
    """One line per data source: its accuracies, and the change since `first`, if that is another evaluation."""
    lines: dict[str, str] = {}
    for name, value in metrics.items():
        if match := _ACCURACY.fullmatch(name):
            change = f" ({value - first[name]:+.2f})" if first.get(name, value) != value else ""
            lines[match["source"]] = lines.get(match["source"], match["source"]) + f" {match['of']} {value:.3f}{change}"
    return list(lines.values())


def plain_progress(state: State) -> str:
    """One line for the progress within a stage."""
    detail = "".join(f"  {name.rpartition('/')[2]} {value:.4g}" for name, value in state.detail.items())
    return f"[{state.stage}] {state.done}/{state.total}{detail}"


_COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("tool use", "rollout/tool_use", ".2f"),
    ("clip", "pg_update/clip/total/rate", ".3f"),
    ("grad", "actor/grad_norm", ".2f"),
    ("tok/s", "tokens/per_second", ",.0f"),
)


def render(state: State, now: float) -> RenderableType:
    """The live panel."""
    parts: list[RenderableType] = [_stages(state, now)]
    if state.total:
        parts.append(_progress(state))
    rewards = [metrics["reward/mean"] for _, metrics in state.steps if "reward/mean" in metrics]
    if rewards:
        line = Text.assemble(("reward  ", "dim"), f"{rewards[0]:.2f} ", (sparkline(rewards, 60), "green"))
        parts += [Text(), line + Text.assemble(f" {rewards[-1]:.2f}", (f"   best {max(rewards):.2f}", "dim"))]
    evaluated, accuracies = state.evaluation
    parts += [Text.assemble(("eval    ", "dim"), text, (f"   step {evaluated}", "dim")) for text in accuracies]
    if state.steps:
        parts += [Text(), _table(state), _legend(state)]
    subtitle = f"[dim]{duration(now - state.began)} elapsed[/]"
    return Panel(
        Group(*parts), title=Text(state.title, style="bold"), subtitle=subtitle, border_style="dim", padding=(0, 1)
    )


def _stages(state: State, now: float) -> Text:
    line = Text()
    for name, spent in state.passed:
        line.append(f"✓ {name} ", "green").append(f"{duration(spent)}   ", "dim")
    if state.stage:
        line.append(f"● {state.stage} ", "bold cyan").append(duration(now - state.entered), "dim")
    return line


def _progress(state: State) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    label = f"step {state.done}/{state.total}" if state.stage == "rl" else f"{state.done}/{state.total}"
    detail = "  ".join(f"{name.rpartition('/')[2]} {value:.4g}" for name, value in state.detail.items())
    eta = f"eta {duration(state.eta_s)}" if state.eta_s is not None else ""
    row.add_row(ProgressBar(total=state.total, completed=state.done, width=40), label, detail, Text(eta, "dim"))
    return row


def _table(state: State) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for label in ("step", *(label for label, _, _ in _COLUMNS), "time"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("phases", no_wrap=True)
    for step, metrics in state.steps[-_ROWS:]:
        cells = [format(metrics[name], form) if name in metrics else "–" for _, name, form in _COLUMNS]
        wall = f"{metrics['time/step']:.1f}s" if "time/step" in metrics else "–"
        table.add_row(str(step), *cells, wall, _phase_bar(metrics))
    return table


def _phase_bar(metrics: Mapping[str, float], width: int = 24) -> Text:
    walls = [max(0.0, metrics.get(f"time/{phase}", 0.0)) for phase in PHASES]
    total = sum(walls)
    bar = Text()
    for wall, colour in zip(walls, _PHASE_COLOURS, strict=True):
        bar.append("━" * round(width * wall / total) if total else "", colour)
    return bar


def _legend(state: State) -> Text:
    present = set().union(*(metrics for _, metrics in state.steps[-_ROWS:]))
    line = Text()
    for phase, colour in zip(PHASES, _PHASE_COLOURS, strict=True):
        if f"time/{phase}" in present:
            line.append("━ ", colour).append(f"{phase}  ", "dim")
    return line
