"""The stop signal of a run, with the times of the job's scheduler and launcher: its end, the wait after SIGTERM."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time

from ctpo_megatron.base.stop import StopSignal

log = logging.getLogger(__name__)

_SCONTROL_TIMEOUT_S = 10.0  # one question to Slurm
_TORCHRUN_GRACE_S = 30.0  # torchrun's default, from the signal that ends its ranks to SIGKILL

_EARLIER = "ask for an earlier signal, which is treated alike: #SBATCH --signal=USR1@{seconds:.0f}"


def stop_signal(deadline: float | None, grace_s: float) -> StopSignal:
    """For `run.deadline` and `checkpoint.grace_s`, as the job's scheduler and launcher allow."""
    end = job_end(deadline)
    warn_of_short_grace(grace_s, end)
    return StopSignal(grace_s, end)


def job_end(deadline: float | None) -> float | None:
    """When this job ends, in seconds since the epoch: `run.deadline`, else Slurm's SLURM_JOB_END_TIME; None: never.

    A time of Slurm's in the past is not this job's: a shell or a `scontrol update` may have left it behind.
    """
    if deadline is not None:
        return deadline
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    if not text:
        return None
    if not text.isdecimal() or float(text) <= time.time():
        log.warning("SLURM_JOB_END_TIME=%s is no time to come and is ignored: give run.deadline", text)
        return None
    return float(text)


def warn_of_short_grace(grace_s: float, job_end: float | None) -> None:
    """Warn when `checkpoint.grace_s` is longer than launcher or scheduler wait before they kill; on rank zero.

    Where the job's end is known, the state is saved before it, however late Slurm's signal is.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCHRUN_GRACE_S))
        remedy = "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT with more (or give --shutdown-timeout, unless you did)"
        _warn(grace_s, limit, "torchrun kills its ranks", remedy)
    if job_end is None and "SLURM_JOB_ID" in os.environ and (wait := kill_wait()) is not None:
        _warn(grace_s, wait, "Slurm kills a job (KillWait)", _EARLIER.format(seconds=grace_s + wait))


def kill_wait() -> float | None:
    """Seconds between SIGTERM and SIGKILL as this cluster's Slurm has them; None if it does not say."""
    command = ["scontrol", "show", "config"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("KillWait of Slurm is not known: %s", error)
        return None
    found = re.search(r"^KillWait\s*=\s*(\d+)", shown.stdout, re.MULTILINE)
    return float(found[1]) if found else None


def _warn(grace_s: float, limit_s: float, who: str, remedy: str) -> None:
    if grace_s >= limit_s:
        log.warning("checkpoint.grace_s is %g s, but %s %g s after SIGTERM: %s", grace_s, who, limit_s, remedy)
