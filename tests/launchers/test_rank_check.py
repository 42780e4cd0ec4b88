"""`ctpo launch --check` in the ranks of a job: real ranks over gloo, with given findings of their nodes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.checks import RankCheck, ranks
from ctpo_megatron.checks.ranks import free_port, meet
from ctpo_megatron.cli.job_check import table
from ctpo_megatron.config import Problem, passed
from tests.support.deadlines import scaled
from tests.support.ranks import prefork

pytestmark = pytest.mark.timeout(300)


def rank(given: Sequence[Problem], wait_s: float, late_s: float, meets: str) -> None:
    ranks.FINDINGS_TIMEOUT_S = wait_s
    if meets == "here":  # a process of its own would import torch again
        ranks.exchange = _meet
    found, ready = RankCheck().run(lambda: time.sleep(late_s) or list(given))
    rows = {node: [[p.key, p.severity, p.message] for p in part] for node, part in found.items()}
    print(json.dumps([rows, ready]))


def _meet(to: str, kind: str, own: tuple[Any, ...], count: int) -> tuple[Problem, str]:
    return passed(kind, f"{count} ranks: {meet(to, kind, *own, count)}"), ""


def job(
    tmp_path: Path, findings: Sequence[Sequence[Problem]], wait_s: float = 200, late_s: float = 0, meets: str = "apart"
) -> list[tuple[dict[str, list], bool]]:
    """What the ranks of a job saw, one on each node. late_s: after which the last one has its findings.

    meets: `here`: the ranks exchange tensors themselves, not in processes of their own.
    """
    nodes = len(findings)
    port = str(free_port())
    processes = []
    for number, given in enumerate(findings):
        own = {"RANK": number, "GROUP_RANK": number, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        all_ = {"WORLD_SIZE": nodes, "GROUP_WORLD_SIZE": nodes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {key: str(value) for key, value in (own | all_).items()} | {"GLOO_SOCKET_IFNAME": "lo"}
        arguments = (list(given), wait_s, late_s if number == nodes - 1 else 0, meets)
        output = tmp_path / f"rank{number}"
        processes.append(prefork().start(rank, *arguments, output=output, environment=os.environ | variables))
    try:
        statuses = [process.wait(scaled(280)) for process in processes]
    finally:
        for process in processes:
            process.end()
    assert statuses == [0] * nodes, [process.stderr.read_text() for process in processes]
    return [json.loads(process.stdout.read_text().splitlines()[-1]) for process in processes]


def test_two_ranks_exchange_and_rank_zero_has_all_findings(tmp_path: Path) -> None:
    torch = [[passed("torch", "2.13.0; found")], [passed("torch", "2.12.0; found")]]
    (found, ready), (same, told) = job(tmp_path, torch)
    assert [name.split(" (")[0] for name in found] == ["node 0", "node 1", "all nodes"]
    between = {key: (severity, message) for key, severity, message in found["all nodes"]}
    assert between["torch"][0] == "error" and between["torch"][1].startswith("differs between nodes: 2.13.0 on node 0")
    assert between["gloo between ranks"][0] == "ok"
    assert "2 ranks: an all-reduce of 16 MiB took" in between["gloo between ranks"][1]
    assert between["transport"] == ("ok", "gloo over lo, on CPUs")
    assert (ready, told, same) == (False, False, found)


def test_ranks_without_findings_are_ready(tmp_path: Path) -> None:
    assert [ready for _, ready in job(tmp_path, [[passed("cores", "2")]] * 2, meets="here")] == [True, True]


def test_a_node_that_is_late_is_named_and_the_wait_ends(tmp_path: Path) -> None:
    (found, ready), (_, told) = job(tmp_path, [[passed("cores", "2")], [passed("cores", "2")]], wait_s=2, late_s=6)
    assert found["node 0 (" + socket.gethostname() + ")"] == [["cores", "ok", "2"]]
    ((_, severity, message),) = [row for row in found["all nodes"] if row[0] == "node"]
    assert severity == "error" and message == "no findings of rank 1 after 2 s"
    assert (ready, told) == (False, False)


def test_what_all_nodes_share_is_one_row() -> None:
    found = {
        "node 0 (a)": [passed("python", "3.11"), Problem("/dev/shm", "1 GiB free", "more", severity="warning")],
        "node 1 (b)": [passed("python", "3.11")],
        "all nodes": [passed("gloo", "fine")],
    }
    assert table(found) == [
        ("python", "ok", "3.11"),
        ("/dev/shm", "note", "node 0 (a): 1 GiB free; more"),
        ("gloo", "ok", "fine"),
    ]
