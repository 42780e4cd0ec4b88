"""How often SFT used its conversations: what the metric, the report and the summary say is what happened."""

from __future__ import annotations

import io
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

from ctpo_megatron.data import Trajectory, batches
from ctpo_megatron.report import conversation_uses, print_summary, write_report
from ctpo_megatron.tracking import sft_metrics
from tests.tracking.synthetic_run import logged


def conversations(count: int) -> list[Trajectory]:
    made = [Trajectory(str(number), 0, 0) for number in range(count)]
    for number, trajectory in enumerate(made):
        trajectory.append_context([1] * (number % 7 + 1), 0)
    return made


@pytest.mark.parametrize(("count", "per_step"), [(22, 8), (16, 16), (100, 16), (300, 16), (7, 3), (5, 1)])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 50])
def test_the_words_are_true_of_the_batches(count: int, per_step: int, steps: int) -> None:
    used = Counter(t.prompt_id for batch in islice(batches(conversations(count), per_step, 0), steps) for t in batch)
    uses = [used[str(number)] for number in range(count)]
    said = conversation_uses(steps * per_step / count)
    numbers = {int(found) for found in re.findall(r"(?<![\d.])(\d+)(?![\d.%])", said)}
    if min(uses) == max(uses):
        assert said == ("each used once" if uses[0] == 1 else f"each used {uses[0]} times")
    elif min(uses) == 0:
        assert max(uses) == 1 and said == f"{sum(uses) / count:.1%} used once, the others never"
    else:
        assert numbers == {min(uses), max(uses)} and f"{sum(uses) / count:.2f} on average" in said


def test_the_record_of_a_step_report_and_summary_say_it(tmp_path: Path) -> None:
    records = [sft_metrics({"supervised/loss": 1.0, "sft/epoch": step * 8 / 10}) for step in (1, 2, 3)]
    assert [record["sft/epoch"] for record in records] == [0.8, 1.6, 2.4]
    run_dir = logged(tmp_path, *records, file="sft.jsonl")
    said = "each used 2 or 3 times, 2.40 on average"
    assert said in write_report(run_dir).read_text(encoding="utf-8")
    printed = io.StringIO()
    print_summary(run_dir, Console(file=printed, width=300))
    assert said in printed.getvalue()
