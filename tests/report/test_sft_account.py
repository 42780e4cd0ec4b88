"""How often SFT used its conversations: what the metric, the report and the summary say is what happened."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from ctpo_megatron.report import print_summary, write_report
from ctpo_megatron.tracking import sft_metrics
from tests.tracking.synthetic_run import logged


def test_the_record_of_a_step_report_and_summary_say_it(tmp_path: Path) -> None:
    records = [sft_metrics({"supervised/loss": 1.0, "sft/epoch": step * 8 / 10}) for step in (1, 2, 3)]
    assert [record["sft/epoch"] for record in records] == [0.8, 1.6, 2.4]
    run_dir = logged(tmp_path, *records, file="sft.jsonl")
    said = "each used 2.4 times on average"
    assert said in write_report(run_dir).read_text(encoding="utf-8")
    printed = io.StringIO()
    print_summary(run_dir, Console(file=printed, width=300))
    assert said in printed.getvalue()
