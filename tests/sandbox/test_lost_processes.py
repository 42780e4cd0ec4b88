"""A worker or template that fails in the middle of something: every request ends with a verdict or an error."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctpo_sandbox import Limits, SandboxServer, SandboxStartError
from ctpo_sandbox.errors import WorkerLost
from ctpo_sandbox.inside.libraries import BUILT_IN
from ctpo_sandbox.server.processes import Template
from tests.sandbox.conftest import small_server
from tests.sandbox.fragile import fragile
from tests.sandbox.sandbox_http import HTTP, health, post


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxServer]:
    with fragile(tmp_path_factory.mktemp("lost")) as server:
        yield server


def printed(server: SandboxServer, comment: str = "") -> str:
    return post(server, {"code": f"print('well') # {comment}"}).json()["run_result"]["stdout"]


def metric(server: SandboxServer, start: str) -> float:
    """Of the metric whose line begins so."""
    (line,) = (each for each in HTTP.get(f"{server.url}/metrics").text.splitlines() if each.startswith(start))
    return float(line.split()[-1])


def test_a_worker_lost_while_it_cleans_up_after_a_fault_leaves_no_request_without_verdict(
    server: SandboxServer,
) -> None:
    before = health(server.url)["restarts"]
    assert printed(server, "FAULT") == "well\n"
    assert health(server.url)["restarts"] == before + 1


def test_a_program_that_ends_one_worker_after_another_gets_a_verdict(server: SandboxServer) -> None:
    reply = post(server, {"code": "'RAISES'"}).json()
    assert (reply["status"], reply["run_result"]["return_code"]) == ("runtime_error", -9)
    said = "[killed because it ended its worker 2 times, and the worker runs other programs]\n"
    assert reply["run_result"]["stderr"] == said
    assert printed(server) == "well\n"


def test_workers_that_die_of_any_program_are_no_verdict(tmp_path: Path) -> None:
    """The machine is at fault then."""
    with fragile(tmp_path) as server:
        (tmp_path / "raising").touch()
        reply = post(server, {"code": "'RAISES'"})
    assert reply.status_code == 503 and "died; then died" in reply.json()["detail"]


def test_a_defect_anywhere_is_a_counted_503(tmp_path: Path) -> None:
    """Not a 500: the request may be sent again, and the metrics show it. Its text need not be encodable."""
    with fragile(tmp_path) as server:
        paths = itertools.product(("'DEFECT'", "'LATE'"), ("/faas/sandbox/", "/run_code"))
        replies = [post(server, {"code": code}, path) for code, path in paths]
        (tmp_path / "sick").touch()
        replies.append(HTTP.get(f"{server.url}/health"))
        assert metric(server, 'ctpo_sandbox_rejected_total{code="503"') == 5
    assert [reply.status_code for reply in replies] == [503] * 5
    assert "ZeroDivisionError" in replies[0].json()["detail"] and replies[0].headers["x-sandbox-fault"] == "defect"


def test_a_template_that_is_killed_as_it_first_starts_is_replaced(tmp_path: Path) -> None:
    with fragile(tmp_path, killed=2) as server:
        assert printed(server) == "well\n" and metric(server, "ctpo_sandbox_lost{") == 2


def test_a_template_that_is_always_killed_is_said(tmp_path: Path) -> None:
    said = r"the template of stdlib .* died instead of being there to start"
    with pytest.raises(SandboxStartError, match=said), fragile(tmp_path, killed=3):
        pass


@pytest.mark.parametrize(("times", "starts"), [(2, True), (3, False)])
def test_a_server_that_is_killed_as_it_first_starts_is_replaced(
    times: int, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = itertools.count()

    class Killed(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if next(numbers) < times:
                self.kill()

    monkeypatch.setattr(subprocess, "Popen", Killed)
    with contextlib.ExitStack() as stack:
        if not starts:
            stack.enter_context(pytest.raises(SandboxStartError, match="it ended with status -9"))
        server = stack.enter_context(small_server(tmp_path))
        assert server.health["status"] == "ok"
    assert caplog.text.count("something killed the sandbox server while it started") == 2


def test_a_template_that_is_slow_to_start_is_gone_afterwards(tmp_path: Path) -> None:
    """Its hello would be taken for the answer to the next request."""
    template = Template(BUILT_IN[0], "none", Limits(), tmp_path, start_timeout_s=0.01)

    async def spawn() -> None:
        with pytest.raises(WorkerLost, match=r"waited 0.01 s"):
            await template.spawn(0, str(tmp_path / "slot"))

    try:
        asyncio.run(spawn())
        assert template.pid is None
    finally:
        template.kill()
