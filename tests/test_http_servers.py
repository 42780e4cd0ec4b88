"""Every HTTP server of ours against the same table of requests, slow clients and crowds of them."""

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
from tests.tracking.synthetic_run import write_run

ROOT = Path(__file__).parents[1]
JSON = ("content-type", "application/json")
TEXT = ("content-type", "text/plain")
MOST_FILES = 256
HURRIED = """
import sys
from pathlib import Path
from ctpo_sandbox import front
front.BODY_TIMEOUT_S = front.REPLY_TIMEOUT_S = 0.5
front.HEAD_TIMEOUT_S = 2.0  # a client of a busy machine may be late
"""
SANDBOX = """
from ctpo_sandbox.server import main
raise SystemExit(main(sys.argv[1:]))
"""
PROMETHEUS = """
from ctpo_megatron.tracking.trackers.prometheus import Prometheus
tracker = Prometheus(Path(sys.argv[1]), {"run": {"name": "demo"}}, None, sys.argv[2], 0)
print(tracker.identity, file=sys.stderr, flush=True)
sys.stdin.read()
tracker.close()
"""


@dataclass(frozen=True)
class Kind:
    """A server: its program, what it is asked for, and the content type it takes (None: it takes no content)."""

    program: str
    arguments: tuple[str, ...]
    path: str
    posts_to: str
    content_type: str | None = None


SERVERS = {
    "sandbox": Kind(
        SANDBOX,
        ("--port", "0", "--slots", "1", "--tiers", "stdlib", "--require", "none", "--open-files", "64"),
        "/health",
        "/run_code",
        "application/json",
    ),
    "prometheus": Kind(PROMETHEUS, ("RUN", "127.0.0.1"), "/metrics", "/metrics"),
}


@dataclass(frozen=True)
class Server:
    kind: Kind
    host: str
    port: int
    process: subprocess.Popen[str]

    def connect(self) -> socket.socket:
        connection = socket.create_connection((self.host, self.port), scaled(20))
        connection.settimeout(scaled(20))
        return connection

    def ask(self, method: str, path: str, *headers: tuple[str, str], body: bytes = b"") -> tuple[int, bytes]:
        """Status and head of the answer to exactly these headers, and a length."""
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
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


@contextlib.contextmanager
def started(kind: Kind, run_dir: Path) -> Iterator[Server]:
    arguments = [str(run_dir) if word == "RUN" else word for word in kind.arguments]
    command = [sys.executable, "-c", HURRIED + kind.program, *arguments]
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
        yield Server(kind, found[1], int(found[2]), process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(SERVERS[request.param], write_run(tmp_path_factory.mktemp("runs"), steps=2)) as server:
        yield server


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 200),
        ([("origin", "OWN")], 200),
        ([("sec-fetch-site", "same-origin")], 200),
        ([("sec-fetch-site", "none")], 200),
        *(([("origin", origin)], 403) for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "file://")),
        ([("origin", "")], 403),
        ([("origin", "OWN"), ("origin", "http://evil.example")], 403),
        ([("sec-fetch-site", "cross-site")], 403),
        ([("sec-fetch-site", "same-site")], 403),
        ([("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")], 403),
    ],
)
def test_pages_of_other_sites_are_refused(server: Server, headers: list[tuple[str, str]], status: int) -> None:
    own = f"http://{server.host}:{server.port}"
    headers = [(name, own if value == "OWN" else value) for name, value in headers]
    assert server.ask("GET", server.kind.path, server.own, *headers)[0] == status


HOSTS = ["evil.example", "10.0.0.1:80", "localhost.example.com", "127.0.0.1.evil", "[::2]", "[::1]evil", "::1", "a:1"]


@pytest.mark.parametrize("host", HOSTS)
def test_other_hosts_are_refused(server: Server, host: str) -> None:
    for more in ([], [("origin", f"http://{host}")]):  # as a name that points to this machine sends it
        assert server.ask("GET", server.kind.path, ("host", host), *more)[0] == 421


def test_localhost_is_this_machine(server: Server) -> None:
    assert server.ask("GET", server.kind.path, ("host", f"LOCALHOST:{server.port}"))[0] == 200


def test_one_host_is_named(server: Server) -> None:
    for hosts in ([], [server.own, ("host", "evil.example")], [server.own, server.own]):
        assert server.ask("GET", server.kind.path, *hosts)[0] == 400


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    for headers in ([JSON], [TEXT], []):
        status, head = server.ask(method, server.kind.posts_to, server.own, *headers)
        assert status == 405 and b"\r\nallow: " in head


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", None]
)
def test_other_content_types_are_refused(server: Server, content_type: str | None) -> None:
    headers = [] if content_type is None else [("content-type", content_type)]
    expected = 405 if server.kind.content_type is None else 415
    assert server.ask("POST", server.kind.posts_to, server.own, *headers, body=b"{}")[0] == expected


def test_a_slow_sender_is_given_up(server: Server) -> None:
    with server.connect() as connection:
        until = time.monotonic() + scaled(20)
        with contextlib.suppress(ConnectionError):
            for byte in b"GET / HTTP/1.1\r\nHost: " + b"x" * 10_000:  # drop by drop
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
                assert time.monotonic() < until, "the server waits on"


def test_a_slow_body_is_given_up(server: Server) -> None:
    head = f"POST {server.kind.posts_to} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n{': '.join(JSON)}\r\n"
    with server.connect() as connection:
        connection.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
        expected = b"405" if server.kind.content_type is None else b"408"
        assert read_all(connection).startswith(b"HTTP/1.1 " + expected)


def test_a_slow_reader_is_given_up(server: Server) -> None:
    request = f"GET {server.kind.path} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n\r\n".encode() * 10
    with server.connect() as connection:
        until = time.monotonic() + scaled(60)
        connection.setblocking(False)
        with contextlib.suppress(ConnectionError):
            while True:  # ask without reading a byte
                assert time.monotonic() < until, "the server waits on"
                with contextlib.suppress(BlockingIOError):
                    connection.send(request)
                    continue
                time.sleep(0.05)
    assert server.ask("GET", server.kind.path, server.own)[0] == 200


def test_a_crowd_is_bounded_and_keeps_nobody_out(server: Server) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(2 * MOST_FILES):
            held.enter_context(server.connect())
        before = time.monotonic()
        assert server.ask("GET", server.kind.path, server.own)[0] == 200
        assert time.monotonic() - before < scaled(5)
        assert len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < MOST_FILES // 2
