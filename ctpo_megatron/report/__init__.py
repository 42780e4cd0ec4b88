"""report: what people see of finished and running runs, from their files alone.

`print_summary` and `write_report` take a run directory, `write_comparison` and `save_figures` several. `write_page`
writes a page in the same style, with charts of its own: one file that opens offline. `first_batch_warnings` says
whether anything can be learned from a batch, `Decline` whether a run gets worse. `groups_of` runs are compared by
`compare_accuracies`, `comparison_table` and `paper_figures` (docs/compare.md).
"""

from ctpo_megatron.report.accuracies import SourceComparison, compare_accuracies
from ctpo_megatron.report.axes import Axis
from ctpo_megatron.report.charts import Chart, Curve, bars, curves, cycled, points, save_charts
from ctpo_megatron.report.comparison_table import comparison_table, notes_of_accuracies
from ctpo_megatron.report.decline import Decline, decline_of
from ctpo_megatron.report.figures import Figure, save_figures
from ctpo_megatron.report.group_notes import notes_of
from ctpo_megatron.report.groups import RunGroup, groups_of
from ctpo_megatron.report.learning import FALLEN, first_batch_warnings
from ctpo_megatron.report.page import write_comparison, write_page, write_report
from ctpo_megatron.report.paper_figures import paper_figures
from ctpo_megatron.report.position_charts import position_charts
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.summary import Summary, conversation_uses, print_summary, summarize

__all__ = [
    "FALLEN",
    "Axis",
    "Chart",
    "Curve",
    "Decline",
    "Figure",
    "RunData",
    "RunGroup",
    "SourceComparison",
    "Summary",
    "bars",
    "compare_accuracies",
    "comparison_table",
    "conversation_uses",
    "curves",
    "cycled",
    "decline_of",
    "first_batch_warnings",
    "groups_of",
    "notes_of",
    "notes_of_accuracies",
    "paper_figures",
    "points",
    "position_charts",
    "print_summary",
    "save_charts",
    "save_figures",
    "summarize",
    "write_comparison",
    "write_page",
    "write_report",
]
