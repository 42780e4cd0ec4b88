"""The display informs, in plain lines and on a terminal, and never ends a run."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys

import pytest
from rich.console import Console

from ctpo_megatron.tracking import Display, duration

METRICS = {"reward/mean": 0.5, "rollout/tool_use": 0.75, "time/step": 2.0, "time/rollout": 1.5}
METRICS |= {"tokens/per_second": 900}


def run_through(display: Display) -> None:
    with display:
        display.stage("sft")
        for done in range(0, 101):
            display.progress(done, 100, {"sft/loss": 1.0})
        display.stage("rl")
        for step in (1, 2):
            display.step(step, METRICS)
        display.note("weights/v2 published [ok]")
        display.stage("report")


@pytest.mark.parametrize("mode", ["auto", "plain", "off"])
def test_there_is_one_line_a_step_which_is_recorded_in_all_modes(mode):
    """`auto` is plain where there is no terminal; `off` prints nothing."""
    lines, output = [], io.StringIO()
    run_through(Display(mode, 30, Console(file=output, width=60), record=lines.append))
    steps = [line for line in lines if line.startswith("[rl] step")]
    assert steps[0] == "[rl] step  1/30  reward 0.500  tool use 0.75  tok/s 900  2.0s (rollout 1.5)  eta 58.0s"
    assert len(steps) == 2 and "weights/v2 published [ok]" in lines
    assert sum(line.startswith("[sft] ") for line in lines) == 12  # started, and every tenth of the way
    assert output.getvalue().splitlines() == ([] if mode == "off" else lines)


EVALUATED = {"val/aime/acc/mean@8": 0.9144, "val/aime/acc/best@8": 1.0, "val/aime/tool_use": 1.0, "time/eval": 2.0}


def test_an_evaluation_is_printed_when_it_happens():
    output = io.StringIO()
    with Display("auto", 30, Console(file=output, width=60)) as display:
        display.evaluation(0, EVALUATED | {"val/b/acc/mean@8": 0.25}, EVALUATED | {"val/b/acc/mean@8": 0.25})
        display.evaluation(8, EVALUATED, {"val/aime/acc/mean@8": 0.4, "val/aime/acc/best@8": 1.0})
        display.evaluation(9, {"time/eval": 2.0}, {})
    assert output.getvalue().splitlines() == [
        "[eval] step 0 aime mean@8 0.914 best@8 1.000",
        "[eval] step 0 b mean@8 0.250",
        "[eval] step 8 aime mean@8 0.914 (+0.51) best@8 1.000",
    ]


def test_a_terminal_has_lines_and_beneath_them_the_progress_of_the_stage():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system=None, width=110, height=40)
    run_through(Display("auto", 30, console, title="demo [x]"))
    text = output.getvalue()
    for part in ("demo [x]", "sft", "100/100", "rl", "2/30", "eta 58.0s", "reward 0.500", "published [ok]", "report"):
        assert part in text
    assert text.endswith("\x1b[?25h")  # the cursor is visible again


def test_log_records_go_above_the_bar_and_back_afterwards(monkeypatch):
    stderr = io.StringIO()
    stderr.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stderr)
    logger, handler = logging.getLogger("observe-display-test"), logging.StreamHandler(stderr)
    logger.addHandler(handler)
    screen = io.StringIO()
    try:
        with Display("auto", 30, Console(file=screen, force_terminal=True, width=100)) as display:
            display.stage("rl")
            logger.warning("engine restarted")
        assert "engine restarted" in screen.getvalue()
        assert handler.stream is stderr
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("force_terminal", [False, True])
def test_a_failing_display_goes_dark_and_the_run_goes_on(force_terminal, caplog):
    display = Display("auto", 30, Console(file=io.StringIO(), force_terminal=force_terminal, width=80))
    with display:
        display.step(1, None)  # type: ignore[arg-type]
        display.step(2, METRICS)
    assert display.mode == "off"
    assert caplog.text.count("switched off") == 1


def test_a_null_metric_does_not_disturb_the_line():
    output = io.StringIO()
    with Display("plain", 3, Console(file=output, width=200)) as display:
        display.step(1, {**METRICS, "reward/mean": float("nan")})
    assert "reward nan" in output.getvalue()
    assert display.mode == "plain"


def test_durations_are_readable():
    assert [duration(seconds) for seconds in (8.26, 125, 11_220)] == ["8.3s", "2m05s", "3h07m"]


UNREAD = """
from ctpo_megatron.tracking import Display
with Display("{mode}", 30) as display:
    for step in range(1, 4):
        display.step(step, {metrics})
    display.end(lambda console: console.print("summary"))
"""


@pytest.mark.parametrize("mode", ["plain", "off"])
def test_a_run_whose_output_nobody_reads_goes_on(mode: str) -> None:
    """As before `| head`, or `| tee` that the same Ctrl-C has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-c", UNREAD.format(mode=mode, metrics=METRICS)]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the reader of standard output is gone") == 1
    assert "Traceback" not in done.stderr
