"""tracking: a run's output for people (metrics, dumps, display, summary, report). Training reads nothing of it back.

    trackers = open_trackers(config, directory)             TensorBoard, Weights & Biases, MLflow, users' own
    writer = MetricsWriter(directory, trackers)             metrics.jsonl, and the same to the trackers
    timer = PhaseTimer(directory)                           time/<phase>, and totals per stage
    with Display(config.tracking.live, config.run.steps) as display: ...
    write_trajectories(directory, step, groups, decode)     trajectories/step_%06d.parquet; `DumpWriter`: in a thread
    write_report(directory); print_summary(directory)       both need the run directory only

Training code calls these and ignores their results. Every metric is defined in docs/metrics.md.
"""

from ctpo_megatron.tracking.display import Display
from ctpo_megatron.tracking.dump_writer import FAILURES as DUMP_FAILURES
from ctpo_megatron.tracking.dump_writer import DumpWriter
from ctpo_megatron.tracking.figures import drawn
from ctpo_megatron.tracking.heartbeat import Heartbeat, read_heartbeat
from ctpo_megatron.tracking.learning import first_batch_warnings
from ctpo_megatron.tracking.metrics import MetricsWriter, read_metrics
from ctpo_megatron.tracking.panels import LIGHT
from ctpo_megatron.tracking.positions import PositionsWriter, read_positions
from ctpo_megatron.tracking.report import write_page, write_report
from ctpo_megatron.tracking.summary import Summary, conversation_uses, print_summary, summarize
from ctpo_megatron.tracking.throughput import phase_peaks, sft_metrics, throughput_metrics
from ctpo_megatron.tracking.timing import Phases, PhaseTimer, Progress
from ctpo_megatron.tracking.trackers import PROMETHEUS_ADDRESS, Tracker, Trackers, open_trackers, tracker_problem
from ctpo_megatron.tracking.train_log import TrainLog
from ctpo_megatron.tracking.trajectories import (
    Decode,
    discard_dumps,
    export_lines,
    read_trajectories,
    recorded_trajectories,
    trajectory_files,
    trajectory_of,
    write_trajectories,
)

__all__ = [
    "DUMP_FAILURES",
    "LIGHT",
    "PROMETHEUS_ADDRESS",
    "Decode",
    "Display",
    "DumpWriter",
    "Heartbeat",
    "MetricsWriter",
    "PhaseTimer",
    "Phases",
    "PositionsWriter",
    "Progress",
    "Summary",
    "Tracker",
    "Trackers",
    "TrainLog",
    "conversation_uses",
    "discard_dumps",
    "drawn",
    "export_lines",
    "first_batch_warnings",
    "open_trackers",
    "phase_peaks",
    "print_summary",
    "read_heartbeat",
    "read_metrics",
    "read_positions",
    "read_trajectories",
    "recorded_trajectories",
    "sft_metrics",
    "summarize",
    "throughput_metrics",
    "tracker_problem",
    "trajectory_files",
    "trajectory_of",
    "write_page",
    "write_report",
    "write_trajectories",
]
