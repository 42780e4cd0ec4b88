"""Checks of a job on a cluster: what `ctpo launch` looks at before it submits, and a node before Ray starts on it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.base.addresses import is_free
from ctpo_megatron.config import Problem
from ctpo_megatron.preflight.check import Check
from ctpo_megatron.preflight.timeouts import GIT_TIMEOUT_S


@dataclass(frozen=True)
class LaunchContext:
    """A job to submit.

    grace_s: `checkpoint.grace_s`. signal_s: seconds before its time limit at which the job gets SIGTERM; None: it has
    no limit. code: the checkout whose last commit the job runs; None: the files that are here.
    """

    grace_s: float
    signal_s: float | None = None
    code: Path | None = None


def check_grace(context: LaunchContext) -> Iterator[Problem]:
    """Whether a checkpoint can be written between the signal and the end of the job."""
    if context.signal_s is not None and context.grace_s >= context.signal_s:
        message = (
            f"but the job gets its signal only {context.signal_s:g} s before its time limit "
            "(signal_s of the cluster file)"
        )
        yield Problem("checkpoint.grace_s", message, "raise signal_s, or lower checkpoint.grace_s", context.grace_s)


def check_committed(context: LaunchContext) -> Iterator[Problem]:
    """Whether the last commit has all that the job is to run."""
    if context.code is None:
        return
    command = ["git", "-C", str(context.code), "status", "--porcelain", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
        failure = done.stderr.strip() if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure is not None:
        yield Problem("", f"{context.code} is not a git checkout, from which a job takes its code: {failure}")
    elif done.stdout:
        message = f"a job gets the code of the last commit; commit or put away first:\n{done.stdout.rstrip()}"
        yield Problem("", message)


@dataclass(frozen=True)
class NodeContext:
    """A node of a job. token_file: of the job's secret. listens: address and port of node 0, if it is this one."""

    token_file: Path
    listens: tuple[str, int] | None = None


def check_secret(context: NodeContext) -> Iterator[Problem]:
    """Whether the job's secret can be read, and by its owner alone."""
    path = context.token_file
    try:
        is_open, text = path.stat().st_mode & 0o077, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield Problem("", f"the job's secret cannot be made or read: {error}")
        return
    if is_open:
        yield Problem("", f"{path} can be read or written by other users; type chmod 600 {path}")
    if not text.strip():
        yield Problem("", f"{path} is empty: write a secret into it, or remove it and node 0 makes one")


def check_port(context: NodeContext) -> Iterator[Problem]:
    """Whether node 0 can listen where the others look for it."""
    if context.listens is None:
        return
    address, port = context.listens
    try:
        if not is_free(address, port):
            what = f"port {port} at {address} is taken by another program"
            yield Problem("", f"{what}: give another --port, the same to all nodes")
    except OSError as error:
        yield Problem("", f"{address} port {port}: {error.strerror}; is it an address of this node (--address)?")


LAUNCH_CHECKS: tuple[Check[LaunchContext], ...] = (check_grace, check_committed)
NODE_CHECKS: tuple[Check[NodeContext], ...] = (check_secret, check_port)
