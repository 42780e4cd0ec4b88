"""Names and texts of data, models and users' code steer no terminal, no log and no page."""

from __future__ import annotations

import io
import logging
import random
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ctpo_megatron.base.terminal import Terminal
from ctpo_megatron.base.text import PrintableFormatter, printable, say
from ctpo_megatron.cli.console import print_table
from ctpo_megatron.cli.errors import report_error
from ctpo_megatron.config import ConfigError, Problem
from ctpo_megatron.report import print_summary, write_report
from ctpo_megatron.tracking import Display, MetricsWriter, TrainLog
from tests.tracking.synthetic_run import step_metrics, write_run

NAME = "a\x1b]0;PWN\x07\x9b2J\u202eb\r\u2028[bold]\ud800"
SHOWN = r"a\x1b]0;PWN\x07\x9b2J\u202eb\r\u2028[bold]\ud800"
DRAWN = SHOWN.replace(r"\x07", "").replace(r"\r", "")
"""By rich, which leaves some control characters out by itself."""
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_printable_can_be_encoded_and_steers_nothing(text: str) -> None:
    shown = printable(text)
    assert not STEERS.search(shown) and "\n" not in shown and "\t" not in shown
    assert not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in shown)
    shown.encode()
    assert printable(shown) == shown
    assert not STEERS.search(printable(text, lines=True))


@pytest.mark.parametrize("text", ["", "plain", "größer ≤ 3", "数学", "می\u200cخواهم", "👩\u200d🔬", "a b", "c:\\x1b"])
def test_ordinary_names_stay_as_they_are(text: str) -> None:
    assert printable(text) == text == printable(text, lines=True)


def test_lines_stay_lines_where_they_may() -> None:
    assert printable("a\n\tb\x1b") == r"a\n\tb\x1b"
    assert printable("a\n\tb\x1b\r", lines=True) == "a\n\tb\\x1b\\r"


def test_the_log_and_its_terminal_are_printable(tmp_path: Path) -> None:
    with TrainLog(tmp_path) as train_log:
        train_log.shown(NAME)
        logging.getLogger("ctpo_megatron.x").warning("a name: %s", NAME)
    lines = (tmp_path / "logs" / "train.log").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 and all(SHOWN in line for line in lines)
    record = logging.LogRecord("x", logging.INFO, "x", 1, "%s\n%s", (NAME, "next"), None)
    assert PrintableFormatter("%(message)s").format(record) == f"{SHOWN}\nnext"


def test_what_rich_draws_is_printable() -> None:
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=300, color_system=None)
    table = Table(NAME, title=Text(NAME))
    table.add_row(Text(NAME))
    console.print(Panel(table, title=Text(NAME)), Text(NAME), NAME, markup=False)
    assert out.getvalue().count(DRAWN) >= 3 and not STEERS.search(out.getvalue())


@pytest.mark.parametrize("live", [False, True])
def test_the_display_is_printable(live: bool) -> None:
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=live, width=300, color_system=None)
    metrics = {f"val/{NAME}/acc/mean@1": 0.5, f"sft/{NAME}": 1.0, "reward/mean": 1.0}
    with Display("auto", 2, console=console, title=NAME) as display:
        display.stage(NAME)
        display.progress(1, 2, metrics)
        display.note(NAME)
        display.step(1, metrics)
        display.evaluation(1, metrics, {})
    shown = out.getvalue()
    assert DRAWN in shown
    if live:  # rich moves the cursor, hides and shows it
        shown = re.sub(r"\x1b\[(\?25[lh]|[0-9]*[ABCDGK])|\r", "", shown)
    assert not STEERS.search(shown)


def test_tables_lines_and_errors_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(NAME, ("a", "b", "c"), [(NAME, NAME, NAME)])
    say(NAME)
    report_error(ConfigError([Problem(NAME, NAME, NAME, value=NAME, where=NAME)]), "train")
    report_error(RuntimeError(NAME), "train")
    for text in capsys.readouterr():
        assert SHOWN in text and not STEERS.search(text)


def test_a_run_of_somebody_else_is_shown_printably(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, final=f"{NAME} \\boxed{{2}}.".replace("\ud800", ""))
    with MetricsWriter(run_dir) as writer:
        writer.log(20, step_metrics(random.Random(0), 20, 20) | {f"val/{NAME}/acc/mean@1": 0.5, f"reward/{NAME}": 1.0})
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert not STEERS.search(page) and r"a\x1b]0;PWN" in page
    out = io.StringIO()
    print_summary(run_dir, Terminal(file=out, force_terminal=False, width=300))
    assert SHOWN in out.getvalue() and not STEERS.search(out.getvalue())
