"""A server that is asked for too much, too slowly, or to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ctpo_sandbox import SandboxServer
from tests.sandbox.conftest import SANDBOX, announced, wait_until
from tests.sandbox.sandbox_http import HTTP
from tests.support.deadlines import scaled

FEW_FILES, CONNECTIONS = 64, 100
HURRIED = """
import os
from ctpo_sandbox import front
front.HEAD_TIMEOUT_S = front.BODY_TIMEOUT_S = 0.5
front.REPLY_TIMEOUT_S = float(os.environ.get("REPLY_TIMEOUT_S", 60))
front.MAX_UNREAD_BYTES = int(os.environ.get("MAX_UNREAD_BYTES", 1 << 30))
from ctpo_sandbox.server import main
raise SystemExit(main())
"""
OPTIONS = ["--port", "0", "--slots", "1", "--max-waiting", "2", "--tiers", "stdlib", "--require", "none"]


class _Server:
    """A process with few open files at first, a short queue and short deadlines; not started again when it ends."""

    def __init__(self, folder: Path, **settings: str) -> None:
        announce = folder / "url"
        command = [sys.executable, "-c", HURRIED, *OPTIONS, "--announce", str(announce)]
        self.process = subprocess.Popen(
            ["sh", "-c", f'ulimit -Sn {FEW_FILES}; exec "$@"', "sh", *command],
            env={**os.environ, "PYTHONPATH": str(SANDBOX), **settings},
        )
        self.url = announced(announce, self.process)

    def connect(self) -> socket.socket:
        url = httpx.URL(self.url)
        connection = socket.create_connection((url.host, url.port))
        connection.settimeout(scaled(20))
        return connection

    def ask(self, code: str) -> httpx.Response:
        return HTTP.post(f"{self.url}/faas/sandbox/", json={"code": code, "run_timeout": 8})

    def end(self) -> None:
        self.process.kill()
        self.process.wait(scaled(20))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Server]:
    server = _Server(tmp_path_factory.mktemp("front"))
    yield server
    server.end()


def _request(body: bytes, length: int | None = None, host: str = "localhost") -> bytes:
    head = f"POST /faas/sandbox/ HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


LARGE = {"code": r"import os; os.write(1, b'\0' * 999_000); os.write(2, b'\0' * 999_000)"}
LARGE_BYTES = 12 * 999_000  # each as \u0000 in JSON


def _not_reading(server: _Server) -> socket.socket:
    """A connection that has asked for an answer which the kernel alone cannot hold."""
    url = httpx.URL(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((url.host, url.port))
    connection.settimeout(scaled(20))
    connection.sendall(_request(json.dumps(LARGE).encode()))
    connection.recv(1)
    return connection


def _rest_of(connection: socket.socket) -> int:
    size = 0
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            size += len(part)
            if size >= LARGE_BYTES:
                break
    return size


@pytest.fixture
def strict(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[_Server]:
    server = _Server(tmp_path, **request.param)
    yield server
    server.end()


@pytest.mark.parametrize("strict", [{"REPLY_TIMEOUT_S": "0.5"}], indirect=True)
def test_an_answer_that_is_not_read_is_given_up(strict: _Server) -> None:
    with _not_reading(strict) as connection, _not_reading(strict) as slow:
        deadline = time.monotonic() + scaled(1.5)
        while time.monotonic() < deadline:  # drop by drop is no reading either
            with contextlib.suppress(ConnectionResetError):
                slow.recv(100)
            time.sleep(0.05)
        assert _rest_of(connection) < LARGE_BYTES and _rest_of(slow) < LARGE_BYTES
        assert strict.ask("print(1)").json()["run_result"]["stdout"] == "1\n"


@pytest.mark.parametrize("strict", [{"MAX_UNREAD_BYTES": str(LARGE_BYTES * 3 // 2)}], indirect=True)
def test_answers_that_are_not_read_are_bounded_together(strict: _Server) -> None:
    with ExitStack() as held:
        connections = [held.enter_context(_not_reading(strict)) for _ in range(4)]
        sizes = [_rest_of(connection) for connection in connections]
    assert sizes[0] < LARGE_BYTES <= sizes[-1], sizes


def test_a_slow_reader_gets_its_whole_answer(server: _Server) -> None:
    with _not_reading(server) as connection:
        time.sleep(0.5)
        assert _rest_of(connection) >= LARGE_BYTES


def _all_of(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_idle_connections_do_not_keep_others_out(server: _Server) -> None:
    with ExitStack() as held:
        for _ in range(CONNECTIONS):
            held.enter_context(server.connect())
        assert server.ask("print(1)").json()["run_result"]["stdout"] == "1\n"


def test_a_slow_head_or_body_is_given_up(server: _Server) -> None:
    with server.connect() as head, server.connect() as body:
        head.sendall(_request(b"{}")[:40])
        body.sendall(_request(b"{", length=100))
        assert _all_of(head) == b""
        assert _all_of(body).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_comes_drop_by_drop_is_given_up(server: _Server) -> None:
    with server.connect() as connection, pytest.raises(ConnectionError):
        for byte in _request(b"{}", host="x" * 400):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)


def test_two_host_headers_are_refused(server: _Server) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head)
        assert _all_of(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("answers", "hosts"),
    [
        ({200}, ["localhost:80", "127.0.0.2", "[::1]:8080", "LOCALHOST"]),
        ({421}, ["rebound.example.com", "10.0.0.1:80", "localhost.example.com", "[::2]", "x"]),
        ({400, 421}, ["127.0.0.1.evil", "127.0.0.1:80:evil", "[::1]evil", "localhost:x", "[::1", "::1", "a:1"]),
    ],
)
def test_only_loopback_is_asked_for_without_a_token(
    sandbox_server: SandboxServer, answers: set[int], hosts: list[str]
) -> None:
    for host in hosts:
        assert HTTP.get(f"{sandbox_server.url}/health", headers={"host": host}).status_code in answers, host


def _asked(server: _Server, code: str) -> tuple[threading.Thread, list[httpx.Response]]:
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(server.ask(code)))
    thread.start()
    return thread, replies


def _waiting(server: _Server) -> int:
    return HTTP.get(f"{server.url}/health").json()["waiting"]


def test_a_full_queue_says_so_and_a_server_that_ends_finishes_it(server: _Server) -> None:
    assert HTTP.get(f"{server.url}/ready").status_code == 200
    asked = []
    for number in range(3):
        asked.append(_asked(server, f"import time; time.sleep(0.7); print({number})"))
        wait_until(lambda: _waiting(server) >= number, "the request to wait")  # noqa: B023
    refused = server.ask("print(1)")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert [HTTP.get(f"{server.url}/{path}").status_code for path in ("live", "ready")] == [200, 503]
    server.process.send_signal(signal.SIGTERM)
    for number, (thread, replies) in enumerate(asked):
        thread.join(scaled(20))
        assert replies[0].json()["run_result"]["stdout"] == f"{number}\n"
    assert server.process.wait(scaled(20)) == 128 + signal.SIGTERM
    with pytest.raises(httpx.ConnectError):
        server.ask("print(1)")


CODE = {"code": "print(7)"}
JSON = {"content-type": "application/json"}


def _sent(server: SandboxServer, headers: Iterable[tuple[str, str]], path: str = "/faas/sandbox/") -> int:
    return HTTP.post(f"{server.url}{path}", content=json.dumps(CODE), headers=list(headers)).status_code


@pytest.mark.parametrize("path", ["/faas/sandbox/", "/run_code"])
@pytest.mark.parametrize(
    "headers",
    [{"origin": origin} for origin in ("http://evil.example", "null", "http://localhost:1", "https://127.0.0.1:9", "")]
    + [{"origin": "file://"}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}],
)
def test_a_web_page_of_another_origin_is_refused(
    sandbox_server: SandboxServer, path: str, headers: dict[str, str]
) -> None:
    """A browser sends these two headers itself; a page cannot change them."""
    assert _sent(sandbox_server, (JSON | headers).items(), path) == 403


def test_two_origins_are_refused(sandbox_server: SandboxServer) -> None:
    own = ("origin", sandbox_server.url)
    assert _sent(sandbox_server, [*JSON.items(), own, ("origin", "http://evil.example")]) == 403
    sites = [("sec-fetch-site", site) for site in ("same-origin", "cross-site")]
    assert _sent(sandbox_server, [*JSON.items(), *sites]) == 403
    for site in ("same-origin", "none"):
        assert _sent(sandbox_server, [*JSON.items(), own, ("sec-fetch-site", site)]) == 200


@pytest.mark.parametrize("path", ["/faas/sandbox/", "/run_code"])
@pytest.mark.parametrize(
    ("content_type", "status"),
    [("application/json", 200), ("Application/JSON; charset=utf-8", 200), (None, 415), ("", 415)]
    + [(name, 415) for name in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")]
    + [("text/plain; application/json", 415), ("application/jsonx", 415)],
)
def test_only_json_is_read(sandbox_server: SandboxServer, path: str, content_type: str | None, status: int) -> None:
    """A page may send the other types to any origin without asking it first."""
    headers = [] if content_type is None else [("content-type", content_type)]
    assert _sent(sandbox_server, headers, path) == status
