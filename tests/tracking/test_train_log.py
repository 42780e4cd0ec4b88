"""logs/train.log: what a run said, with times, also on a terminal whose lines are gone."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest

from ctpo_megatron.tracking import TrainLog


def written(directory: Path) -> list[str]:
    return (directory / "logs" / "train.log").read_text(encoding="utf-8").splitlines()


def test_lines_shown_logged_and_warned_of_have_their_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging.captureWarnings(False)  # a library may have asked for it outside of this test
    with TrainLog(tmp_path) as train_log:
        train_log.shown("[rl] step 1/2")
        logging.getLogger("ctpo_megatron.policy").warning("a rank is slow")
        warnings.warn("an old name", UserWarning, stacklevel=1)
    logging.getLogger("ctpo_megatron.policy").warning("after the end")
    lines = written(tmp_path)
    when = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"
    assert re.fullmatch(when + r" INFO    \[rl\] step 1/2", lines[0])
    assert re.fullmatch(when + r" WARNING a rank is slow", lines[1])
    assert "UserWarning: an old name" in lines[2]
    assert not any("after the end" in line for line in lines)
    assert "[rl] step 1/2" not in "".join(capsys.readouterr())


def test_what_ended_the_run_is_written_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such weight"), TrainLog(tmp_path):
        raise ValueError("no such weight")
    with TrainLog(tmp_path) as train_log:
        train_log.shown("resumed")
    lines = written(tmp_path)
    assert "ERROR   the run ends with ValueError" in lines[0]
    assert lines[-2:][0] == "ValueError: no such weight" and lines[-1].endswith("resumed")
