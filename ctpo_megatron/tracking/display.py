"""The display of a run: a live panel on a terminal, one line per step elsewhere."""

from __future__ import annotations

import errno
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TextIO

from rich.console import Console, RenderableType
from rich.live import Live

from ctpo_megatron.base.terminal import Terminal
from ctpo_megatron.base.text import hidden
from ctpo_megatron.tracking.display_view import State, accuracy_lines, plain_progress, plain_step, render

log = logging.getLogger(__name__)

Mode = Literal["auto", "plain", "off"]
P = ParamSpec("P")


def _harmless(method: Callable[Concatenate[Display, P], None]) -> Callable[Concatenate[Display, P], None]:
    """A display that fails logs one warning and switches off: it must never end a run."""

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

    auto: a live panel if the console is a terminal, else plain lines; log records appear above the panel.
    """

    def __init__(
        self,
        mode: Mode,
        total_steps: int,
        console: Console | None = None,
        title: str = "ctpo",
        record: Callable[[str], None] = lambda line: None,
    ) -> None:
        """record: called with every plain line and every note, in all modes."""
        self.console = console or _Screen()
        self.mode: Literal["live", "plain", "off"] = (
            ("live" if self.console.is_terminal else "plain") if mode == "auto" else mode
        )
        self._state = State(title=title, total_steps=total_steps)
        self._live: Live | None = None
        self._rerouted: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._printed_tenth = -1
        self._record = record

    def __enter__(self) -> Display:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @_harmless
    def stage(self, name: str) -> None:
        """Enter a stage: sft, rl, evaluation, export or report."""
        self._state.enter(name)
        self._printed_tenth = -1
        self._plain(f"[{name}] started")

    @_harmless
    def progress(self, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None:
        """Progress within a stage other than the RL steps; plain mode prints every tenth of the way."""
        self._state.progress(done, total, metrics or {})
        tenth = 10 * done // max(total, 1)
        if tenth != self._printed_tenth:
            self._printed_tenth = tenth
            self._plain(plain_progress(self._state))

    @_harmless
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished RL step from the metrics that were logged for it."""
        self._state.add(step, metrics)
        self._plain(plain_step(self._state))

    @_harmless
    def evaluation(self, step: int, metrics: Mapping[str, float], first: Mapping[str, float]) -> None:
        """Show the accuracies among the metrics of a step, if any; first: metrics of the run's first evaluation."""
        if lines := accuracy_lines(metrics, first):
            self._state.evaluation = (step, lines)
        for line in lines:
            self._plain(f"[eval] step {step} {line}")

    @_harmless
    def note(self, text: str) -> None:
        """Print a line that stays (above the panel when there is one)."""
        self._record(text)
        if self.mode != "off":
            self._print(text)

    @_harmless
    def end(self, summary: Callable[[Console], None]) -> None:
        """Stop the panel and print a summary, in all modes."""
        self.stop()
        summary(self.console)

    def _plain(self, line: str) -> None:
        self._record(line)
        if self.mode == "plain":
            self._print(line)

    def _print(self, text: str) -> None:
        self.console.print(hidden(text), markup=False, highlight=False, soft_wrap=True)

    @_harmless
    def _start(self) -> None:
        if self.mode != "live":
            return
        before = (sys.stdout, sys.stderr)
        self._live = Live(
            get_renderable=self._render,
            console=self.console,
            refresh_per_second=2,
            # A stream redirected to a file is left alone.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        self._reroute_logs(before)

    def _render(self) -> RenderableType:
        """Called by the refresh thread, where the caller could not catch an exception."""
        try:
            return render(self._state, time.monotonic())
        except Exception as error:
            return f"(the display failed: {error})"

    def _reroute_logs(self, before: tuple[TextIO, TextIO]) -> None:
        """Redirect existing log handlers to rich's streams, so that they print above the panel."""
        replacements = {id(old): new for old, new in zip(before, (sys.stdout, sys.stderr), strict=True)}
        for handler in _stream_handlers():
            replacement = replacements.get(id(handler.stream))
            if replacement is not None and replacement is not handler.stream:
                self._rerouted.append((handler, handler.stream))
                handler.setStream(replacement)

    def stop(self) -> None:
        """Stop the panel, leaving its last state on the screen."""
        for handler, stream in self._rerouted:
            handler.setStream(stream)
        self._rerouted.clear()
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            except Exception:
                log.warning("the display could not be stopped cleanly", exc_info=True)


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    known = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    for logger in known:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                yield handler
