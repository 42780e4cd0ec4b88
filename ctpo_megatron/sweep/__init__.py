"""sweep: the product of a grid of configurations, one run after the other, from one SFT; a killed sweep continues.

`read_grid` reads `--grid`, `plan` makes the runs, `check` checks all of them, `Runner` runs them and `SweepRecord` is
what is kept in `sweep.json`.
"""

from ctpo_megatron.sweep.checks import check, check_rows
from ctpo_megatron.sweep.grid import Grid, GridAxis, read_grid
from ctpo_megatron.sweep.plan import PlannedRun, SftMode, Sweep, plan
from ctpo_megatron.sweep.record import SweepRecord, is_done
from ctpo_megatron.sweep.runner import Runner, SweepOutcome, train_command

__all__ = [
    "Grid",
    "GridAxis",
    "PlannedRun",
    "Runner",
    "SftMode",
    "Sweep",
    "SweepOutcome",
    "SweepRecord",
    "check",
    "check_rows",
    "is_done",
    "plan",
    "read_grid",
    "train_command",
]
