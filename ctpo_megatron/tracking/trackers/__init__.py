"""Trackers: further destinations of the metrics of a run, in addition to metrics.jsonl.

with open_trackers(config, directory) as trackers:      # as `tracking.trackers` lists them
    trackers.log(step, metrics)                         # never raises, never waits longer than tracking.timeout_s
"""

from ctpo_megatron.tracking.trackers.prometheus import ADDRESS as PROMETHEUS_ADDRESS
from ctpo_megatron.tracking.trackers.protocol import Tracker, tracker_problem
from ctpo_megatron.tracking.trackers.threads import Trackers, open_trackers

__all__ = ["PROMETHEUS_ADDRESS", "Tracker", "Trackers", "open_trackers", "tracker_problem"]
