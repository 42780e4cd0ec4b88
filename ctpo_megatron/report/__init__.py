"""report: what people see of finished and running runs, from their files alone.

`print_summary` and `write_report` take a run directory, `write_comparison` and `save_figures` a `Comparison`.
Its endpoints are for `value_table` and `difference_table` (docs/compare.md).
`first_batch_warnings` says whether anything can be learned from a batch, `Decline` whether a run gets worse.
"""

from ctpo_megatron.report.comparison import Comparison, difference_table, value_table
from ctpo_megatron.report.figures import save_figures
from ctpo_megatron.report.learning import FALLEN, Decline, decline_of, first_batch_warnings
from ctpo_megatron.report.page import write_comparison, write_report, write_trajectories_page
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.sampled_rewards import mean_sampled_reward
from ctpo_megatron.report.summary import conversation_uses, print_summary, summarize
from ctpo_megatron.report.trajectories.selection import TrajectoryFilters
