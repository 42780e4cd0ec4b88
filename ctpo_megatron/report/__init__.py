"""report: what people see of finished and running runs, from their files alone.

`print_summary` and `write_report` take a run directory. `write_page` writes a page in the same style: one file that
opens offline. `first_batch_warnings` says whether anything can be learned from a batch, `Decline` whether a run gets
worse.
"""

from ctpo_megatron.report.decline import Decline, decline_of
from ctpo_megatron.report.figures import drawn
from ctpo_megatron.report.learning import FALLEN, first_batch_warnings
from ctpo_megatron.report.page import write_page, write_report
from ctpo_megatron.report.panels import LIGHT
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.summary import Summary, conversation_uses, print_summary, summarize

__all__ = [
    "FALLEN",
    "LIGHT",
    "Decline",
    "RunData",
    "Summary",
    "conversation_uses",
    "decline_of",
    "drawn",
    "first_batch_warnings",
    "print_summary",
    "summarize",
    "write_page",
    "write_report",
]
