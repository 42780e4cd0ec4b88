"""Trackers: further destinations of the metrics of a run, in addition to metrics.jsonl.

with open_trackers(config, directory) as trackers:      # as `tracking.trackers` lists them
    trackers.log(step, metrics)                         # never raises, never waits longer than tracking.timeout_s

TensorBoard writes files in the trainer's process. Every other tracker has its own process, so that neither its failures
nor its packages affect the trainer.
"""

from ctpo_megatron.tracking.trackers.host import Trackers, open_trackers
from ctpo_megatron.tracking.trackers.prometheus import ADDRESS as PROMETHEUS_ADDRESS
from ctpo_megatron.tracking.trackers.protocol import Tracker, tracker_problem

__all__ = ["PROMETHEUS_ADDRESS", "Tracker", "Trackers", "open_trackers", "tracker_problem"]
