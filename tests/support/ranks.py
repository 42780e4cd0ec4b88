"""Functions run by several ranks at once, each a process of one thread that begins with megatron imported."""

from __future__ import annotations

import atexit
import os
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.support.deadlines import scaled
from tests.support.prefork import SHARED, Child, Client, Prefork

PRELOADED = ("pytest", "tests.conftest", "tests.support.preload")
"""In this order: tests.conftest imports Triton so that it can be interpreted."""
PRETENDING = (
    "pytest",
    "tests.conftest",
    "tests.rehearsal.preload",
    "tests.support.preload",
    "tests.rehearsal.transfer_job",
)
"""The same with pretended GPUs, which have to be there before anything looks for CUDA, and with vLLM."""
_OUTPUT_CHARACTERS = 4000
_GRACE_S = 10.0
"""How long the others may take to speak of a rank that failed, before they are killed."""


class RanksFailed(AssertionError):
    """A rank failed, died or did not end in time. The message has every rank's fate and the end of its output."""


class Default:
    """pretend_cuda: whether ranks take the CPU for a GPU where nothing else is said (`pytest --pretend-cuda`)."""

    pretend_cuda = False


def prefork() -> Client:
    """The server of processes that have imported what training needs."""
    return _server(False)


def share() -> Prefork:
    """A server for this process and all that it starts, which find it in their environment."""
    server = Prefork(PRELOADED)
    os.environ[SHARED] = server.address
    return server


@cache
def _server(pretend_cuda: bool) -> Client:
    if not pretend_cuda and SHARED in os.environ:
        return Client(os.environ[SHARED])
    server = Prefork(PRETENDING if pretend_cuda else PRELOADED)
    atexit.register(server.close)
    return server


def run(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = 1,
    deadline_s: float = 280.0,
    server: Client | None = None,
    pretend_cuda: bool | None = None,
) -> list[Any]:
    """Call a function of a module on every rank of a new job; what each returned, in rank order.

    The environment is torchrun's: `RANK`, `WORLD_SIZE`, ..., none of it for one rank. pretend_cuda: see
    `tests/rehearsal/pretend.py`. Raises RanksFailed.
    """
    import torch

    pretend = Default.pretend_cuda if pretend_cuda is None else pretend_cuda
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        store, environments = _rendezvous(ranks)
        children = [
            (server or _server(pretend)).start(
                _call, function, arguments, folder / f"{rank}.pt", pretend, output=folder / f"{rank}", environment=e
            )
            for rank, e in enumerate(environments)
        ]
        try:
            statuses = _wait(children, scaled(deadline_s))
        finally:
            for child in children:
                child.end()
        if any(status != 0 for status in statuses):
            raise RanksFailed(_report(function.__qualname__, children, statuses, deadline_s))
        del store  # kept until here: rank 0 does not hold it
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def endings(
    function: Callable[..., Any], *arguments: Any, ranks: int, deadline_s: float, lasting: Collection[int] = ()
) -> list[tuple[int | None, int]]:
    """The same for ranks that may fail: exit status and process id of each, when all but those `lasting` have ended.

    function: returns the exit status. A rank that had not ended in time, or was not waited for, has None.
    """
    store, environments = _rendezvous(ranks)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        children = [
            prefork().start(function, *arguments, output=Path(name) / f"{rank}", environment=environment)
            for rank, environment in enumerate(environments)
        ]
        end = time.monotonic() + scaled(deadline_s)
        try:
            statuses = [
                None if rank in lasting else child.wait(max(0.0, end - time.monotonic()))
                for rank, child in enumerate(children)
            ]
        finally:
            for child in children:
                child.end()
    del store
    return [(status, child.pid) for status, child in zip(statuses, children, strict=True)]


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], result: Path, pretend: bool) -> int:
    import torch

    torch.set_num_threads(1)
    with _pretending() if pretend else nullcontext():
        found = function(*arguments)
    torch.save(found, result)
    return 0


def _pretending() -> AbstractContextManager[None]:
    from tests.rehearsal.pretend import pretending

    return pretending()


def _rendezvous(ranks: int) -> tuple[Any, list[dict[str, str]]]:
    """Where the ranks meet, on a port that the system chose, and the environment of each."""
    import torch.distributed as dist

    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if ranks == 1:
        return None, [ours]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    job = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 shall not open one
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return store, [ours | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _wait(children: list[Child], seconds: float) -> list[int | None]:
    """Exit statuses; None of those that had not ended in time, or soon after another failed."""
    statuses: list[int | None] = [None] * len(children)
    end = time.monotonic() + seconds
    while (waiting := [n for n, status in enumerate(statuses) if status is None]) and time.monotonic() < end:
        # Not select, which takes no descriptor above 1,023: torch leaves some open with each process group.
        ready = connection.wait([children[n] for n in waiting], max(0.0, end - time.monotonic()))
        for number in waiting:
            if children[number] in ready:
                statuses[number] = children[number].wait(scaled(_GRACE_S))
                if statuses[number] != 0:
                    end = min(end, time.monotonic() + scaled(_GRACE_S))
    return statuses


def _report(name: str, children: list[Child], statuses: list[int | None], deadline_s: float) -> str:
    lines = [f"{name} failed on {len(children)} ranks"]
    for rank, (child, status) in enumerate(zip(children, statuses, strict=True)):
        if status is None:
            fate = f"had not ended (deadline {scaled(deadline_s):g} s) and was killed"
        else:
            fate = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        output = "".join(path.read_text(errors="replace") for path in (child.stdout, child.stderr) if path.exists())
        lines += [f"--- rank {rank} {fate}; its output ends:", output[-_OUTPUT_CHARACTERS:].rstrip()]
    return "\n".join(lines)
