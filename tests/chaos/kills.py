"""What of a run can be killed: its kinds of processes, and how to find them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable

import psutil


def kill(run: int, kind: str, count: int, rng: random.Random) -> list[int]:
    """kill -9 of `count` processes of that kind among the descendants of process `run`, or all there are; their ids."""
    there = of_kind(run, kind)
    chosen = rng.sample(there, min(count, len(there)))
    for process in chosen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return [process.pid for process in chosen]


def of_kind(run: int, kind: str) -> list[psutil.Process]:
    """The living processes of that kind: `run` itself, or among its descendants."""
    trainer = psutil.Process(run)
    if kind == "trainer":
        return [trainer]
    return list(_of_kind(trainer.children(recursive=True), kind))


def _of_kind(processes: Iterable[psutil.Process], kind: str) -> Iterable[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and _IS[kind](process):
                yield process


def _command(process: psutil.Process | None) -> str:
    return "" if process is None else " ".join(process.cmdline())


def _is_engine(process: psutil.Process) -> bool:
    return "RolloutEngine" in _command(process)


def _is_server(process: psutil.Process) -> bool:
    return "ctpo_sandbox.server" in _command(process) and "ctpo_sandbox.server" not in _command(process.parent())


def _is_sandbox_worker(process: psutil.Process) -> bool:
    """Below a template, which is below the server; nothing is below it, but what it runs."""
    above = process.parents()
    servers = [depth for depth, each in enumerate(above) if _is_server(each)]
    return (
        bool(servers)
        and servers[0] >= 1
        and "ctpo_sandbox.inside.template" in _command(process)
        and not process.children()
    )


def _is_template(process: psutil.Process) -> bool:
    return "ctpo_sandbox.inside.template" in _command(process) and _is_server(process.parent() or process)


def _is_scorer(process: psutil.Process) -> bool:
    """Forked by the fork server of the reward functions."""
    return _starts(process.parent(), "forkserver")


def _is_fork_server(process: psutil.Process) -> bool:
    return _starts(process, "forkserver") and not _is_scorer(process)


def _starts(process: psutil.Process | None, module: str) -> bool:
    """Whether it is a helper of multiprocessing."""
    return f"from multiprocessing.{module} import" in _command(process)


def _is_writer(process: psutil.Process) -> bool:
    """A fork of the trainer, or of one that it made."""
    command = _command(process)
    return "quickstart.yaml" in command and command == _command(process.parent())


def _is_agent_of_ray(process: psutil.Process) -> bool:
    return "/ray/" in _command(process) and ".py" in _command(process)


_IS: dict[str, Callable[[psutil.Process], bool]] = {
    "engine": _is_engine,
    "sandbox worker": _is_sandbox_worker,
    "sandbox template": _is_template,
    "sandbox server": _is_server,
    "scorer": _is_scorer,
    "fork server": _is_fork_server,
    "resource tracker": lambda process: _starts(process, "resource_tracker"),
    "results queue": lambda process: _starts(process, "spawn"),
    "checkpoint writer": _is_writer,
    "raylet": lambda process: process.name() == "raylet",
    "gcs": lambda process: process.name() == "gcs_server",
    "agent of ray": _is_agent_of_ray,
}
EVERY = ("trainer", *_IS)
"""All kinds of processes of a run of one rank."""
