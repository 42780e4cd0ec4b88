"""A run that is preempted over midnight, with a chat template that writes the date, continues bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.compare_runs import compare
from tests.end_to_end.small_run import TASK, Ctpo
from tests.support.task import sft_file, task_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TODAY, TOMORROW = "Today+12", "Tomorrow-12"
"""Time zones of POSIX whose clocks are 24 hours apart: `datetime.now()` of one day and of the next."""


@dataclass(frozen=True)
class At(Ctpo):
    """Runs whose local time is that of a time zone."""

    zone: str

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"TZ": self.zone}


def test_a_run_goes_on_the_next_day_bit_for_bit(tmp_path: Path) -> None:
    task = shutil.copytree(TASK, tmp_path / "task")
    template = task / "model" / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %B %Y') }}\n" + template.read_text())
    settings = [
        *task_files(task),
        sft_file(task),
        "data.max_prompt_tokens=96",
        "rollout.engine.max_model_len=320",
    ]
    today, tomorrow = At(tmp_path, TODAY), At(tmp_path, TOMORROW)
    done = today.train("run.name=whole", *settings)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "step 3/3" not in today.train_until("step 2/3", "run.name=midnight", *settings)
    resumed = tomorrow.train("run.name=midnight", "run.resume=true", *settings)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    status, said = compare(tmp_path / "runs" / "whole", tmp_path / "runs" / "midnight")
    assert status == 0, said
    other = tomorrow.train("run.name=other_day", *settings)
    assert other.returncode == 0, other.stderr[-4000:]
    assert compare(tmp_path / "runs" / "whole", tmp_path / "runs" / "other_day")[0] == 1
