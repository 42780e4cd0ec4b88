"""A sweep of stand-ins (`stand_in.py`) in the current folder: `python -m tests.sweep.sweep_stand_ins once a.b=c,d`.

With `impatient` in place of `once`, a run that was asked to stop is killed after two seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ctpo_megatron.base.files import write_json
from ctpo_megatron.sweep import PlannedRun, Runner, SftMode, SweepRecord, plan, read_grid, runner

CONFIG = """\
run: {name: mine, steps: 3}
model: {path: model}
data: {train: [train.parquet]}
sft: {data: [sft.parquet], steps: 5}
checkpoint: {grace_s: 1}
"""
STAND_IN = Path(__file__).with_name("stand_in.py")


def main(mode: SftMode, items: list[str]) -> int:
    """Sweep, and write how it ended to `outcome.json`."""
    Path("my.yaml").write_text(CONFIG)
    sweep = plan("my.yaml", read_grid(items, []), mode)
    outcome = Runner(sweep, SweepRecord.of(sweep, "my.yaml"), command).run()
    write_json(Path("outcome.json"), [outcome.status, [run.name for run in outcome.finished], outcome.failed])
    return outcome.status


def command(run: PlannedRun) -> list[str]:
    return [sys.executable, "-S", str(STAND_IN), *run.overrides]


if __name__ == "__main__":
    if sys.argv[1] == "impatient":
        runner.CLOSING_S = 1.0
    sys.exit(main("each" if sys.argv[1] == "each" else "once", sys.argv[2:]))
