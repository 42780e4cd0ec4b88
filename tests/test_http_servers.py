"""The tracker `prometheus` against requests that are none of its own, and a crowd.

The sandbox has the same server, `ctpo_sandbox.front`. Slow clients and all forms of requests are in
tests/sandbox/test_front.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.deadlines import scaled
from tests.support.prefork import ROOT
from tests.tracking.synthetic_run import write_run

MOST_FILES = 256
PROMETHEUS = """
import sys
from pathlib import Path
from ctpo_megatron.tracking.trackers.prometheus import Prometheus
tracker = Prometheus(Path(sys.argv[1]), {"run": {"name": "demo"}}, None, "127.0.0.1", 0)
print(tracker.identity, file=sys.stderr, flush=True)
sys.stdin.read()
tracker.close()
"""


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    process: subprocess.Popen[str]

    def connect(self) -> socket.socket:
        connection = socket.create_connection((self.host, self.port), scaled(20))
        connection.settimeout(scaled(20))
        return connection

    def ask(self, method: str, *headers: tuple[str, str], body: bytes = b"") -> tuple[int, bytes]:
        """Status and head of the answer to exactly these headers, and a length."""
        lines = [f"{method} /metrics HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
        lines += [f"content-length: {len(body)}"] * bool(body)
        with self.connect() as connection:
            connection.sendall("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
            answer = read_all(connection)
        found = re.match(rb"HTTP/1.1 (\d+) ", answer)
        assert found, answer[:200]
        return int(found[1]), answer.partition(b"\r\n\r\n")[0].lower()

    @property
    def own(self) -> tuple[str, str]:
        return ("host", f"{self.host}:{self.port}")


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = [sys.executable, "-c", PROMETHEUS, str(write_run(tmp_path_factory.mktemp("runs"), steps=2))]
    path = os.pathsep.join([str(ROOT), str(ROOT / "sandbox"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        ["sh", "-c", f'ulimit -n {MOST_FILES}; exec "$@"', "sh", *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        said, deadline = "", time.monotonic() + scaled(60)
        while (found := re.search(r"http://([\d.]+):(\d+)", said)) is None:
            ready, _, _ = select.select([process.stderr], [], [], max(0.0, deadline - time.monotonic()))
            line = process.stderr.readline() if ready else ""
            assert line, f"the server did not come up: {said}"
            said += line
        yield Server(found[1], int(found[2]), process)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("host", ["evil.example", "10.0.0.1:80", "[::2]"])
def test_other_hosts_are_refused(server: Server, host: str) -> None:
    for more in ([], [("origin", f"http://{host}")]):  # as a name that points to this machine sends it
        assert server.ask("GET", ("host", host), *more)[0] == 421


def test_localhost_is_this_machine_and_pages_of_other_sites_are_refused(server: Server) -> None:
    assert server.ask("GET", ("host", f"LOCALHOST:{server.port}"))[0] == 200
    assert server.ask("GET", server.own, ("origin", "http://evil.example"))[0] == 403


def test_one_host_is_named(server: Server) -> None:
    for hosts in ([], [server.own, ("host", "evil.example")], [server.own, server.own]):
        assert server.ask("GET", *hosts)[0] == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    status, head = server.ask(method, server.own, body=b"{}" * (method == "POST"))
    assert status == 405 and b"\r\nallow: " in head


def test_a_crowd_is_bounded_and_keeps_nobody_out(server: Server) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(2 * MOST_FILES):
            held.enter_context(server.connect())
        before = time.monotonic()
        assert server.ask("GET", server.own)[0] == 200
        assert time.monotonic() - before < scaled(5)
        assert len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < MOST_FILES // 2
