"""What `ctpo theory` prints, table for table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctpo_megatron import cli

PRINTED = Path(__file__).with_name("printed.txt")
ROUNDING = re.compile(r" *-?(\d\.\de-1[2-9]|0\.0000)(?=\s)")


def test_the_tables_are_printed_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    """Except for rounding below 1e-12, which differs between machines."""
    assert cli.main(["theory", "--samples", "200"]) == 0
    out, expected = capsys.readouterr().out, PRINTED.read_text(encoding="utf-8")
    assert ROUNDING.sub(" 0", out) == ROUNDING.sub(" 0", expected)
