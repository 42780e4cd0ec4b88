"""Environment variables of Ray's processes and of those that join them. Imports no Ray, which reads some at import."""

from __future__ import annotations

from pathlib import Path

ADDRESS = "RAY_ADDRESS"
"""Names the cluster that a run joins; without it, Ray is private to the run."""
AUTH_MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
PARENT, PREFIX = Path("/tmp"), "ctpo-ray-"
"""Of the folder of a private Ray, which each of its processes writes a log to."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""Ray reports no usage and records no events per call. An engine without its own GPU keeps CUDA_VISIBLE_DEVICES.
Engines have the trainer's priority: with Ray's default niceness of 15 every program of a tool would run before the
engine."""


def ray_with_token(file: Path) -> dict[str, str]:
    """Return what every process needs that starts, joins or uses a Ray whose secret is in `file`, of mode 0600.

    How long a node tolerates the absence of its head is Ray's default: 60 s.
    """
    return {**QUIET, AUTH_MODE: "token", TOKEN_FILE: str(file)}
