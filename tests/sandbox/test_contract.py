"""However a program ends, and whatever it prints, the answer is HTTP 200 with a verdict."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctpo_sandbox import SandboxServer, start_server
from tests.sandbox.conftest import Runner, small_server
from tests.sandbox.sandbox_http import HTTP, health, post
from tests.support.deadlines import scaled

PAUSES = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
IGNORED = {signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGCONT, signal.SIGPIPE, signal.SIGXFSZ}
"""By the kernel, or by Python."""

OF_THE_C_LIBRARY = {32, 33}
"""Whether it handles them depends on what the server did before."""

RAW = "import ctypes, os, resource, signal, sys, threading, time\nlibc = ctypes.CDLL(None)\n"
ENDS = {
    "os._exit(0)": "success",
    "os._exit(255)": "runtime_error",
    "sys.exit(-1)": "runtime_error",
    "raise KeyboardInterrupt": "runtime_error",
    "raise GeneratorExit": "runtime_error",
    "os.abort()": "runtime_error",
    "ctypes.string_at(0)": "runtime_error",
    "libc._exit(7)": "runtime_error",
    "libc.syscall(60, 0)": "success",
    "libc.syscall(60, 9)": "runtime_error",
    "threading.Thread(target=time.sleep, args=[9]).start(); libc.syscall(60, 0)": "runtime_error",
    "threading.Thread(target=time.sleep, args=[9], daemon=True).start(); libc.syscall(60, 0)": "runtime_error",
    "threading.Thread(target=os._exit, args=[0]).start(); time.sleep(9)": "success",
    "os.execv(sys.executable, ['python'])": "runtime_error",
    "libc.syscall(59, b'/bin/true', 0, 0)": "success",
    "resource.setrlimit(resource.RLIMIT_CORE, (-1, -1)); os.abort()": "runtime_error",
    "signal.raise_signal(signal.SIGSTOP)": "timeout",
    "os.write(1, bytes(range(256))); os.write(2, bytes(range(256)))": "success",
    "os.write(1, b'\\xe2\\x82'); os.write(2, b'\\xf0\\x9f\\x98')": "success",
    "os.write(1, b'\\xed\\xa0\\x80')": "success",
    "os.close(1); os.close(2)": "success",
    "os.write(1, b'\\xe2\\x82\\xac' * 400_000)": "success",
    "os.write(2, b'\\xff'); os.kill(os.getpid(), 40)": "runtime_error",
}
"""Program -> status."""


@pytest.fixture
def background_job() -> Iterator[None]:
    """This process ignores and blocks signals as one that was started with `nohup` and `&`, or by a thread, may."""
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGQUIT)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in ignored.items():
        signal.signal(number, handler)


def test_how_the_server_was_started_changes_no_verdict(background_job: None, tmp_path: Path) -> None:
    with start_server(slots=1, start_timeout_s=scaled(60), log_path=tmp_path / "log", tiers=["stdlib"]) as server:
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGINT):
            reply = post(server, {"code": f"import os; os.kill(os.getpid(), {number}); print('still here')"}).json()
            assert (reply["status"], reply["run_result"]["return_code"]) == ("runtime_error", -number)


@pytest.mark.parametrize("number", range(1, 65))
def test_every_signal_is_a_verdict(sandbox_server: SandboxServer, number: int) -> None:
    """Real-time signals have no names in Python, and the C library hides two of them."""
    code = f"import os; os.kill(os.getpid(), {number}); print('still here')"
    before = health(sandbox_server.url)["restarts"]  # other tests of this server kill its workers
    reply = post(sandbox_server, {"code": code, "run_timeout": 0.2 if number in PAUSES else scaled(8)})
    assert reply.status_code == 200, reply.text
    status, result = reply.json()["status"], reply.json()["run_result"]
    if number in PAUSES:
        assert status == "timeout"
    elif number in IGNORED:
        assert (status, result["stdout"]) == ("success", "still here\n")
    elif number in OF_THE_C_LIBRARY and status == "success":
        assert result["stdout"] == "still here\n"
    elif number == signal.SIGKILL:  # refused to the program
        assert status == "runtime_error" and "PermissionError" in result["stderr"]
    else:
        assert (status, result["return_code"]) == ("runtime_error", -number)
        named = f" ({signal.Signals(number).name})" if number in set(signal.Signals) else ""
        assert f"[killed by signal {number}{named}]" in result["stderr"]
    assert health(sandbox_server.url)["restarts"] == before


@pytest.mark.parametrize("code", ENDS)
def test_every_end_is_a_verdict(sandbox_server: SandboxServer, code: str) -> None:
    request = {"code": RAW + code, "run_timeout": 0.2 if ENDS[code] == "timeout" else scaled(4)}
    for path in ("/faas/sandbox/", "/run_code"):
        reply = post(sandbox_server, request, path)
        assert reply.status_code == 200, reply.text
        result = reply.json()["run_result"]
        assert isinstance(result["stdout"], str) and isinstance(result["stderr"], str)
        assert path == "/run_code" or reply.json()["status"] == ENDS[code], reply.text


@settings(max_examples=60, derandomize=True)
@given(
    output=st.binary(max_size=12),
    stream=st.integers(1, 2),
    name=st.binary(max_size=15).filter(lambda name: b"\0" not in name),
    end=st.one_of(
        st.integers(1, 64).map(lambda number: f"os.kill(os.getpid(), {number})"),
        st.integers(0, 255).map(lambda number: f"os._exit({number})"),
        st.sampled_from(sorted(set(ENDS) - {"signal.raise_signal(signal.SIGSTOP)"})),
    ),
    path=st.sampled_from(["/faas/sandbox/", "/run_code"]),
)
def test_every_name_output_and_end_together_are_a_verdict(
    sandbox_server: SandboxServer, output: bytes, stream: int, name: bytes, end: str, path: str
) -> None:
    code = f"{RAW}libc.prctl(15, {name!r}, 0, 0, 0)\nopen({name!r} or 'f', 'w')\nos.write({stream}, {output!r})\n{end}"
    reply = post(sandbox_server, {"code": code, "run_timeout": 0.3}, path)
    assert reply.status_code == 200, reply.text
    known = {"success", "timeout", "runtime_error"} if path == "/faas/sandbox/" else {"Success", "Failed"}
    assert reply.json()["status"] in known
    assert isinstance(reply.json()["run_result"]["stderr"], str)
    assert HTTP.get(f"{sandbox_server.url}/ready").status_code == 200


LINES = (b"POST /faas/sandbox/ HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", b"X-Any: 1")
BODY = b'{"code": "print(1)", "run_timeout": 1}'
HEADERS = (
    *(b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"Expect: 100-continue\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Content-Type: text/plain\r\n", b"Host: x\r\n"),
)
WORDS = rb"/run_code /health /metrics OPTIONS HEAD HTTP/1.0 HTTP/2.0 NaN null \ud800 1e999 - : % [ ] { }".split()
BYTES = (b"\xff", b"\0", b"\r", b"\n", b" ", b"\xf0\x9f", b"\xed\xa0\x80", b"{" * 3000)
PIECES = st.sampled_from([*HEADERS, *WORDS, *BYTES])


@settings(max_examples=150, derandomize=True)
@given(changes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 80), st.integers(0, 8), PIECES), max_size=3))
def test_no_bytes_of_a_request_are_answered_by_an_error_of_the_server(
    sandbox_server: SandboxServer, changes: list[tuple[int, int, int, bytes]]
) -> None:
    """Refused or carried out; a connection may be closed without an answer, too."""
    parts = [*LINES, BODY]
    for part, at, length, piece in changes:
        parts[part] = parts[part][:at] + piece + parts[part][at + length :]
    *lines, body = parts
    request = b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"Connection: close", b"", body])
    url = httpx.URL(sandbox_server.url)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.settimeout(scaled(0.5))  # a request that is not complete waits for the rest
        connection.sendall(request)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            answer = connection.recv(64)
            assert not answer or answer.split()[1][:1] in (b"1", b"2", b"3", b"4"), answer


NAMES = {
    "a byte that is no text": b"\xff",
    "half a letter": "abcdefghijklmn\u00e4".encode(),
    "parentheses and numbers": b") R 1 1 (",
    "a line break": b"a\nb",
    "empty": b"",
}


def test_no_name_of_another_process_keeps_a_server_from_stopping(tmp_path: Path) -> None:
    """It looks at all processes of the machine for those of its group."""
    with contextlib.ExitStack() as others:
        for name in NAMES.values():
            renamed = f"ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)"
            code = f"import ctypes, time; {renamed}; print(flush=True); time.sleep(60)"
            named = others.enter_context(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
            others.callback(named.kill)
            assert named.stdout is not None and named.stdout.readline() == b"\n"
        with small_server(tmp_path, level="none", require="none"):
            pass


def test_the_name_of_a_thread_ends_nothing(server_at: Callable[[str], AbstractContextManager[Runner]]) -> None:
    """At a level where the worker counts the threads of a run, as the runs have no user of their own."""
    with server_at("namespaces-user") as run:
        for name in NAMES.values():
            code = (
                f"import ctypes, time; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); time.sleep(0.3); print('well')"
            )
            result = run(code)
            assert (result.status, result.stdout) == ("success", "well\n"), name
