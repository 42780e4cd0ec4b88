"""The display of a run: one line per step, and on a terminal a progress bar beneath."""

from __future__ import annotations

import errno
import functools
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ctpo_megatron.base.terminal import Terminal
from ctpo_megatron.base.text import hidden
from ctpo_megatron.tracking.known_metrics import drawn_in, printed

log = logging.getLogger(__name__)

Mode = Literal["auto", "plain", "off"]
P = ParamSpec("P")
PHASES = tuple(drawn.label for _, drawn in drawn_in("time"))
"""Phases of a step that are shown, as in the report's figure."""
_ACCURACY = re.compile(r"val/(?P<source>.+)/acc/(?P<of>[a-z]+@\d+)")
_PACE = 10
"""Latest steps whose mean time says when the run will end."""


def duration(seconds: float) -> str:
    """Return a readable duration: 8.3s, 2m05s, 3h07m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _harmless(method: Callable[Concatenate[Display, P], None]) -> Callable[Concatenate[Display, P], None]:
    """Have a display that fails log one warning and switch off: it must never end a run."""

    @functools.wraps(method)
    def guarded(self: Display, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.mode = "off"
            self.stop()
            unknown = None if isinstance(error, OSError) else error  # such as a closed terminal
            log.warning("the display failed (%s) and is switched off; the run continues", error, exc_info=unknown)

    return guarded


class _Screen(Terminal):
    """A console that does not end the process when the reader of its pipe is gone."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()  # redirects to /dev/null: output at exit would fail, too
        except SystemExit as end:
            raise BrokenPipeError(errno.EPIPE, "the reader of standard output is gone") from end


class Display:
    """Shows stages and steps; `with Display(...) as display:` always restores the terminal.

    auto: with a progress bar if the console is a terminal, beneath the lines and the log; else plain lines.
    """

    def __init__(
        self,
        mode: Mode,
        total_steps: int,
        console: Console | None = None,
        title: str = "ctpo",
        record: Callable[[str], None] = lambda line: None,
    ) -> None:
        """record: called with every line and every note, in all modes."""
        self.console = console or _Screen()
        self.mode: Literal["live", "plain", "off"] = (
            ("live" if self.console.is_terminal else "plain") if mode == "auto" else mode
        )
        self._title, self._total_steps, self._record = title, total_steps, record
        self._stage, self._printed_tenth = "", -1
        self._walls: list[float] = []
        self._bar: Progress | None = None
        self._rerouted: list[tuple[logging.StreamHandler[Any], Any]] = []

    def __enter__(self) -> Display:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @_harmless
    def stage(self, name: str) -> None:
        """Enter a stage: sft, rl, evaluation, export or report."""
        self._stage, self._printed_tenth = name, -1
        self._line(f"[{name}] started")
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(name, total=self._total_steps if name == "rl" else None)

    @_harmless
    def progress(self, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None:
        """Show progress within a stage other than the RL steps; every tenth of the way has a line."""
        tenth = 10 * done // max(total, 1)
        if tenth != self._printed_tenth:
            self._printed_tenth = tenth
            self._line("  ".join([f"[{self._stage}] {done}/{total}", *printed(metrics or {})]))
        self._advance(done, total)

    @_harmless
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished RL step from the metrics that were logged for it."""
        parts = [f"[rl] step {step:>{len(str(self._total_steps))}}/{self._total_steps}", *printed(metrics)]
        if (wall := metrics.get("time/step")) is not None:
            self._walls = [*self._walls, wall][-_PACE:]
            phases = " ".join(f"{name} {metrics[f'time/{name}']:.1f}" for name in PHASES if f"time/{name}" in metrics)
            parts.append(f"{wall:.1f}s" + (f" ({phases})" if phases else ""))
        if self._walls:
            left_s = sum(self._walls) / len(self._walls) * max(0, self._total_steps - step)
            parts.append(f"eta {duration(left_s)}")
        self._line("  ".join(parts))
        self._advance(step, self._total_steps)

    @_harmless
    def evaluation(self, step: int, metrics: Mapping[str, float], first: Mapping[str, float]) -> None:
        """Show the accuracies among the metrics of a step, if any, a line for each data source.

        first: metrics of the run's first evaluation, which changes are measured from.
        """
        lines: dict[str, str] = {}
        for name, value in metrics.items():
            if match := _ACCURACY.fullmatch(name):
                change = f" ({value - first[name]:+.2f})" if first.get(name, value) != value else ""
                source = match["source"]
                lines[source] = lines.get(source, source) + f" {match['of']} {value:.3f}{change}"
        for line in lines.values():
            self._line(f"[eval] step {step} {line}")

    @_harmless
    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._line(text)

    @_harmless
    def end(self, summary: Callable[[Console], None]) -> None:
        """Stop the bar and print a summary, in all modes."""
        self.stop()
        summary(self.console)

    def _line(self, text: str) -> None:
        self._record(text)
        if self.mode != "off":
            self.console.print(hidden(text), markup=False, highlight=False, soft_wrap=True)

    def _advance(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    @_harmless
    def _start(self) -> None:
        if self.mode != "live":
            return
        before = (sys.stdout, sys.stderr)
        stage, left = TextColumn("{task.description}", markup=False), TimeRemainingColumn()
        self._bar = Progress(
            TextColumn(self._title, markup=False, style="bold"),
            *(stage, BarColumn(), MofNCompleteColumn(), left, TimeElapsedColumn()),
            console=self.console,
            refresh_per_second=2,
            # A stream redirected to a file is left alone.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._bar.add_task("start", total=None)
        self._bar.start()
        self._reroute_logs(before)

    def _reroute_logs(self, before: tuple[TextIO, TextIO]) -> None:
        """Redirect existing log handlers to rich's streams, so that they print above the bar."""
        replacements = {id(old): new for old, new in zip(before, (sys.stdout, sys.stderr), strict=True)}
        for handler in _stream_handlers():
            replacement = replacements.get(id(handler.stream))
            if replacement is not None and replacement is not handler.stream:
                self._rerouted.append((handler, handler.stream))
                handler.setStream(replacement)

    def stop(self) -> None:
        """Stop the bar, leaving its last state on the screen."""
        for handler, stream in self._rerouted:
            handler.setStream(stream)
        self._rerouted.clear()
        bar, self._bar = self._bar, None
        if bar is not None:
            try:
                bar.stop()
            except Exception:
                log.warning("the display could not be stopped cleanly", exc_info=True)


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    known = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    for logger in known:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                yield handler
