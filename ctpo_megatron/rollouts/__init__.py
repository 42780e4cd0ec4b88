"""Rollouts: prompts in, scored batches of groups out, in the order of the run.

`Rollouts` makes training batches, `Evaluation` answers held-out prompts; both take groups from one `GroupSampler`, on
engines or on the `Replay` of a recording, and run on one `EventLoop`. Importing this loads neither Ray nor vLLM.
"""

from __future__ import annotations

from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.rollouts.evaluation import Evaluated, Evaluation
from ctpo_megatron.rollouts.filters import Filters, filter_problem
from ctpo_megatron.rollouts.group_sampler import GroupSampler, Quarantined, TooManyQuarantined
from ctpo_megatron.rollouts.metrics import rollout_metrics
from ctpo_megatron.rollouts.replay import Replay, ReplayError
from ctpo_megatron.rollouts.rollouts import AccountingError, Rollouts
