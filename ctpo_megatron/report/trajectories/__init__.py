"""trajectories: what dumps of trajectories say, chosen, found and prepared for a page.

`sample_of_run` chooses what the report holds; `TrajectoryLibrary` has all. Templates get `GroupView`s.
"""

from ctpo_megatron.report.ratio_names import RatioQuantity
from ctpo_megatron.report.trajectories.address import Address, Addressed
from ctpo_megatron.report.trajectories.library import Deadline, OutOfTimeError, SearchResult, TrajectoryLibrary
from ctpo_megatron.report.trajectories.query import TOOLS, Query, QueryError, snippet
from ctpo_megatron.report.trajectories.ratio import ratio_spec
from ctpo_megatron.report.trajectories.sample import Selection, sample_of_run
from ctpo_megatron.report.trajectories.view import Budget, GroupView, View, view_of

__all__ = [
    "TOOLS",
    "Address",
    "Addressed",
    "Budget",
    "Deadline",
    "GroupView",
    "OutOfTimeError",
    "Query",
    "QueryError",
    "RatioQuantity",
    "SearchResult",
    "Selection",
    "TrajectoryLibrary",
    "View",
    "ratio_spec",
    "sample_of_run",
    "snippet",
    "view_of",
]
