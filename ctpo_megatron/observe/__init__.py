"""observe: everything a run writes for people (metrics, dumps, display, summary, report) and nothing it reads back.

    directory = open_run_directory(config)                  refuses to overwrite; writes config.yaml
    writer = MetricsWriter(directory)                       metrics.jsonl and TensorBoard
    timer = PhaseTimer(directory)                           time/<phase>, and totals per stage
    with Display(config.observe.live, config.run.steps) as display: ...
    write_trajectories(directory, step, groups, decode)     trajectories/step_%06d.jsonl
    write_report(directory); print_summary(directory)       both need the run directory only

Training code calls these and ignores what they return. Every metric is defined in docs/metrics.md.
"""

from .display import Display
from .groups import evaluation_metrics, reward_metrics
from .metrics import MetricsWriter, read_metrics
from .report import write_report
from .run_dir import RunDirectoryError, open_run_directory
from .summary import Summary, print_summary, summarize
from .throughput import phase_peaks, throughput_metrics, warmup_metrics
from .timing import PhaseTimer
from .trajectories import give_up_dumps, read_trajectories, trajectory_files, trajectory_of, write_trajectories

__all__ = [
    "Display",
    "MetricsWriter",
    "PhaseTimer",
    "RunDirectoryError",
    "Summary",
    "evaluation_metrics",
    "give_up_dumps",
    "open_run_directory",
    "phase_peaks",
    "print_summary",
    "read_metrics",
    "read_trajectories",
    "reward_metrics",
    "summarize",
    "throughput_metrics",
    "trajectory_files",
    "trajectory_of",
    "warmup_metrics",
    "write_report",
    "write_trajectories",
]
