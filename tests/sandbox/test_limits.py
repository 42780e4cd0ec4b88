"""What a snippet must not be able to do, and that ending it leaves nothing behind."""

import json
import os
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from ctpo_sandbox import start_server
from tests.sandbox.conftest import runner
from tests.sandbox.other_users import open_interpreter
from tests.sandbox.sandbox_http import health
from tests.support.deadlines import scaled

_SHORT_S = scaled(0.5)


@pytest.mark.parametrize(
    "code", ["while True: pass", "sum(range(9, 10**10))", "pow(73, 99855421)", "import time; time.sleep(60)"]
)
def test_endless_code_times_out(execute, code):
    result = execute(f"print('partial', flush=True)\n{code}", run_timeout_s=_SHORT_S)
    assert (result.status, result.stdout) == ("timeout", "partial\n")
    assert _SHORT_S <= result.wall_s < 2 * _SHORT_S + scaled(4)


def test_timeout_despite_ignored_signals(execute):
    code = "import signal\nfor s in (2, 15, 24):\n    signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    assert execute(code, run_timeout_s=_SHORT_S).status == "timeout"


def test_threads_do_not_outlive_the_limit(execute):
    code = "import threading\nfor _ in range(4):\n    threading.Thread(target=lambda: sum(range(10**12))).start()"
    assert execute(code, run_timeout_s=_SHORT_S).status == "timeout"


@pytest.mark.parametrize(
    "code",
    ["x = bytearray(10**10)", "x = []\nwhile True: x.append(bytearray(10**6))", "import os; os.memfd_create('a')"],
)
def test_memory_bomb(execute, code):
    result = execute(code)
    assert result.status == "runtime_error"
    assert "MemoryError" in result.stderr or "PermissionError" in result.stderr


def test_output_bomb_does_not_grow_the_server(execute, sandbox_server):
    server = psutil.Process(sandbox_server.process.pid)
    execute("print('x' * 10**7)")
    before = server.memory_info().rss
    for stream in (1, 2):
        result = execute(f"import os\nwhile True: os.write({stream}, b'x' * 10**6)")
        output = result.stdout if stream == 1 else result.stderr
        assert result.status == "runtime_error"
        assert len(output) < 1_001_000
        assert "[output cut: the first 1000000 of" in output
    assert server.memory_info().rss - before < 64 * 2**20


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['true'])",
        "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.pidfd_open(os.getppid())",
        "import fcntl, os; fcntl.fcntl(0, 8, os.getppid())",
        "open('/etc/passwd')",
        "open('/proc/1/environ')",
        "open('../x', 'w')",
        "import os, sys; os.remove(sys.executable)",
        "import os; os.symlink('/etc', 'e'); os.listdir('e')",
        "import os; os.listdir('/')",
        "import resource as r; r.setrlimit(r.RLIMIT_CORE, (0, 0))",
    ],
)
def test_refused(execute, code):
    result = execute(code)
    assert result.status == "runtime_error"
    refusals = ("PermissionError", "FileNotFoundError", "Read-only file system", "ValueError: not allowed")
    assert any(refusal in result.stderr for refusal in refusals), result.stderr


def test_raw_system_calls_are_refused(execute):
    """Upper halves of int arguments set, so that a filter comparing all 64 bits would be passed."""
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
high = 1 << 32
call = lambda *args: libc.syscall(*(ctypes.c_uint64(a) for a in args))
print([call(157, high | 1, 0), call(72, 0, high | 10, 9), call(53, high | 2, 1, 0, 0), call(56, 17, 0, 0, 0, 0)])
"""
    if os.uname().machine != "x86_64":
        pytest.skip("system call numbers of x86_64")
    assert execute(code).stdout == "[-1, -1, -1, -1]\n"


def test_unix_stream_pairs_and_threads_work(execute):
    code = "import asyncio\nasync def f(): return await asyncio.to_thread(sum, [1, 2])\nprint(asyncio.run(f()))"
    assert execute(code).stdout == "3\n"


def test_nothing_of_the_server_is_visible(execute):
    environment = json.loads(execute("import json, os\nprint(json.dumps(dict(os.environ)))").stdout)
    assert environment.keys().isdisjoint({"PYTHONPATH", "USER", "LOGNAME", "PYTEST_CURRENT_TEST"})
    open_files = "import os\ndef f(n):\n    try: os.fstat(n); return True\n    except OSError: return False\n"
    assert execute(open_files + "print([n for n in range(200) if f(n)])").stdout == "[0, 1, 2]\n"


def _left_in(directory: Path) -> list[str]:
    """Names in it; none between one run's and the next, when it does not exist."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def test_work_directory_is_removed_whatever_is_in_it(tmp_path, monkeypatch):
    """At a level whose runs keep their files in the server's file system."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = """
import os
print(os.getcwd(), flush=True)
os.symlink('/usr', 'link'); os.mkdir('closed'); open('closed/f', 'w').close(); os.chmod('closed', 0)
for _ in range(1500):
    os.mkdir('d'); os.chdir('d')
"""
    for folder in (tmp_path, *tmp_path.parents):  # runs have users of their own
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o711)
    options = {"slots": 1, "tiers": ["stdlib"], "level": "seccomp", "require": "none", "start_timeout_s": scaled(60)}
    with (
        open_interpreter(),
        start_server(**options, log_path=tmp_path / "log") as server,
        runner(server.url) as execute,
    ):
        directory = Path(execute(code).stdout.strip())
        assert directory.is_relative_to(tmp_path)
        deadline = time.monotonic() + scaled(10)
        while _left_in(directory) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _left_in(directory) == []
        assert execute("import os; print(os.listdir())").stdout == "[]\n"
        assert health(server.url)["restarts"] == 0  # by the worker itself, not by the end of one that found it there
    assert Path("/usr/bin").exists()
    assert list(tmp_path.glob("ctpo-sandbox-*")) == []
