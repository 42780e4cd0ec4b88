"""Trackers: where the metrics of a run go besides its own record, metrics.jsonl.

with open_trackers(config, directory) as trackers:      # those of `tracking.trackers`
    trackers.log(step, metrics)                         # never raises, never waits longer than tracking.timeout_s

TensorBoard writes files in the trainer's process. Every other tracker has a process of its own, so that neither its
failures nor its packages are the trainer's.
"""

from ctpo_megatron.tracking.trackers.check import tracker_problem
from ctpo_megatron.tracking.trackers.host import Trackers, open_trackers
from ctpo_megatron.tracking.trackers.prometheus import ADDRESS as PROMETHEUS_ADDRESS
from ctpo_megatron.tracking.trackers.protocol import Tracker

__all__ = ["PROMETHEUS_ADDRESS", "Tracker", "Trackers", "open_trackers", "tracker_problem"]
