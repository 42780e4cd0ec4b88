"""Queries Slurm about this job: its nodes, their addresses, its end. Every query has a deadline."""

from __future__ import annotations

import os
import re
import subprocess
import time

from ctpo_launchers.timeouts import NODE_COMMAND_TIMEOUT_S

HOSTS_VARIABLE = "CTPO_HOSTS"
"""Names of the job's nodes, separated by commas, from the batch script: a container has no `scontrol`."""


def in_a_job() -> bool:
    """Return whether this process is a task of a Slurm step."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_NODEID" in os.environ


def host_names() -> list[str]:
    """Return the nodes of this job step, the head first. Raises ValueError when Slurm cannot be queried."""
    if given := os.environ.get(HOSTS_VARIABLE):
        return given.split(",")
    compact = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    if names := _ask("scontrol", "show", "hostnames", compact).split():
        return names
    raise ValueError(
        f"scontrol cannot list the nodes of SLURM_JOB_NODELIST={compact!r}; in the batch script, before srun: "
        f'export {HOSTS_VARIABLE}="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)"'
    )


def node_address(name: str) -> str | None:
    """Return the address at which Slurm reaches a node (NodeAddr of slurm.conf); None if unknown."""
    found = re.search(r"\bNodeAddr=(\S+)", _ask("scontrol", "--oneliner", "show", "node", name))
    return found[1] if found else None


def job_end() -> float | None:
    """When this job ends, in seconds since the epoch; None without a limit."""
    if not in_a_job():
        return None
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    if text.isdecimal() and float(text) > time.time():
        return float(text)
    text = _ask("squeue", "--noheader", "--jobs", os.environ["SLURM_JOB_ID"], "--format", "%e").strip()
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # "NONE", or an empty answer
        return None


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=NODE_COMMAND_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
