"""tracking: what a run writes and shows as it goes (metrics, dumps, display). Training reads nothing of it back.

    trackers = open_trackers(config, directory)             TensorBoard, Weights & Biases, MLflow, users' own
    writer = MetricsWriter(directory, trackers)             metrics.jsonl, and the same to the trackers
    phases = Phases(directory)                              time/<phase>, and totals per stage
    with Display(config.tracking.live, config.run.steps) as display: ...
    write_trajectories(directory, step, groups, decode)     trajectories/step_%06d.parquet; `DumpWriter`: in a thread

Training code calls these and ignores their results. `KNOWN_METRICS` defines every metric (docs/reference/metrics.md).
What reads and writes dumps is imported on first use: it needs numpy and pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctpo_megatron.base.front_door import import_when_used
from ctpo_megatron.tracking.display import PHASES, Display, duration
from ctpo_megatron.tracking.dump_writer import FAILURES as DUMP_FAILURES
from ctpo_megatron.tracking.dump_writer import DumpWriter
from ctpo_megatron.tracking.known_metrics import KNOWN_METRICS, KnownMetric, drawn_in, known_metric
from ctpo_megatron.tracking.metrics import MetricsWriter, PositionsWriter, read_metrics, read_positions
from ctpo_megatron.tracking.records import TRACES, Decode, Head, Record
from ctpo_megatron.tracking.throughput import peak_flops, phase_peaks, sft_metrics, throughput_metrics
from ctpo_megatron.tracking.timing import Heartbeat, Phases, Progress, TimeSpent, read_heartbeat, read_stages
from ctpo_megatron.tracking.trackers import PROMETHEUS_ADDRESS, open_trackers, tracker_problem
from ctpo_megatron.tracking.train_log import TrainLog

if TYPE_CHECKING:
    from ctpo_megatron.tracking.trajectories import (
        discard_dumps,
        groups_to_dump,
        read_heads,
        read_texts,
        read_trajectories,
        recorded_trajectories,
        records_at,
        trajectory_files,
        write_trajectories,
    )

__getattr__ = import_when_used(__name__)

__all__ = ["Record", "read_metrics", "read_trajectories"]
"""What users' programs import."""
