"""trajectories: what a dump of trajectories says, chosen, found and prepared for a page.

`sample_of_run` chooses what the report holds; `ctpo watch` shows all. Both give `GroupView`s to the template.
"""

from ctpo_megatron.report.trajectories.address import Address
from ctpo_megatron.report.trajectories.ratio import Quantity, ratio_spec
from ctpo_megatron.report.trajectories.sample import Selection, sample_of_run
from ctpo_megatron.report.trajectories.view import Budget, GroupView, View

__all__ = ["Address", "Budget", "GroupView", "Quantity", "Selection", "View", "ratio_spec", "sample_of_run"]
