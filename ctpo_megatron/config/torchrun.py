"""A process's job, from the environment of torchrun and the system."""

from __future__ import annotations

import os

from ctpo_megatron.config.problems import ConfigError, Problem

_OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_problem(*, planned: bool) -> Problem | None:
    """The problem with an environment that has some of torchrun's variables, but not all.

    planned: nothing is started, and WORLD_SIZE alone is the size of the job to plan for.
    """
    missing = [name for name in _OF_A_RANK if name not in os.environ]
    name = "RANK" if "RANK" in os.environ else "WORLD_SIZE"
    if not missing or (name == "WORLD_SIZE" and (planned or world_size() == 1)):
        return None
    message = f"makes this process a rank of a job, which needs {', '.join(missing)}, too"
    return Problem(name, message, f"type unset {name}, or start the run with torchrun", os.environ[name])


def world_size() -> int:
    """Ranks of this job: WORLD_SIZE as torchrun sets it, else 1. Raises ConfigError if it is not a number."""
    return _count("WORLD_SIZE") or 1


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def node_ranks() -> int | None:
    """Ranks of this node: LOCAL_WORLD_SIZE; None without torchrun. Raises as `world_size`."""
    return _count("LOCAL_WORLD_SIZE")


def _count(name: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not (text.isdecimal() and int(text)):
        raise ConfigError([Problem(name, "is not a number of ranks", f"give 1 or more, or type unset {name}", text)])
    return int(text) if text else None
