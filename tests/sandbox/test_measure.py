"""A run changes what its worker reads of it. A look is never a fault, never leaves the run, and never fails open."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctpo_sandbox import Limits
from ctpo_sandbox.isolation.measure import Disturbed, file_excess, files_below, thread_excess
from tests.sandbox.conftest import Runner, runner
from tests.sandbox.other_users import EVERYWHERE, Host, server_of
from tests.sandbox.sandbox_http import health

pytestmark = pytest.mark.xdist_group("sandbox-users")

FEW = Limits(disk_mb=8, disk_files=2000)
PROCESS_OF_ITS_OWN = "import ctypes, os, sys, threading, time\nos.chdir(sys.argv[1])\n"
READY = "\nprint(flush=True)\ntime.sleep(60)"


class _Child(NamedTuple):
    pid: int
    directory: int


@contextlib.contextmanager
def child(directory: Path, code: str) -> Iterator[_Child]:
    """A process that has run `code` in `directory`; and a descriptor of that."""
    command = [sys.executable, "-c", PROCESS_OF_ITS_OWN + code + READY, str(directory)]
    nothing = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **nothing) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield _Child(process.pid, descriptor)
        finally:
            os.close(descriptor)
            process.kill()


MOVES = """
for i in range(1200): os.mkdir(f"d{i:04}")
os.mkdir("last")
for i in range(12): os.posix_fallocate(os.open(f"last/{i}", os.O_CREAT | os.O_WRONLY), 0, 1 << 20)
def move(start):
    while True:
        for a, b in ("de", "ed"):
            for i in range(start, start + 400): os.rename(f"{a}{i:04}", f"{b}{i:04}")
for k in range(3): threading.Thread(target=move, args=[400 * k], daemon=True).start()
"""
CARRIES = """
for name in "abc": os.makedirs(name)
for i in range(12): os.posix_fallocate(os.open(f"a/{i}", os.O_CREAT | os.O_WRONLY), 0, 1 << 20)
def carry():
    while True:
        for source, target in ("ab", "bc", "ca"):
            for i in range(12): os.rename(f"{source}/{i}", f"{target}/{i}")
threading.Thread(target=carry, daemon=True).start()
"""
PASSES_ON = """
for i in range(12):
    os.posix_fallocate(os.open("f", os.O_CREAT | os.O_WRONLY), 0, 1 << 20); os.remove("f")
kept = range(3, 15)
def turn():
    while True:
        for i in kept: os.dup2(i, i + 100); os.close(i)
        for i in kept: os.dup2(i + 100, i); os.close(i + 100)
threading.Thread(target=turn, daemon=True).start()
"""


RESUMES = (
    PASSES_ON
    + """
def resume():
    while True: os.kill(os.getpid(), 18)
for k in range(2): threading.Thread(target=resume, daemon=True).start()
"""
)


@pytest.mark.parametrize("code", [MOVES, CARRIES, PASSES_ON, RESUMES], ids=["moves", "carries", "passes on", "resumes"])
def test_no_look_misses_what_a_run_moves_about(tmp_path: Path, code: str) -> None:
    with child(tmp_path, code) as (pid, directory):
        for _ in range(10):
            assert "for more than 8 MB" in file_excess(directory, FEW, pid, frozenset())


def test_a_look_that_a_run_does_not_disturb_does_not_stop_it(tmp_path: Path) -> None:
    code = "import signal\nsignal.signal(signal.SIGCONT, lambda *_: open('continued', 'w'))\nos.mkdir('d')\n"
    with child(tmp_path, f"{code}time.sleep(0.2)") as (pid, directory):
        assert [file_excess(directory, FEW, pid, frozenset()) for _ in range(5)] == [""] * 5
    assert not (tmp_path / "continued").exists()


def test_files_without_a_name_count_on_every_file_system(tmp_path: Path) -> None:
    """The device of a file need not be that of its directory: an overlay with layers on two."""
    elsewhere = tmp_path / "run"
    elsewhere.mkdir()
    memory = "kept = [os.memfd_create('m')]; os.posix_fallocate(kept[0], 0, 9 << 20)"
    with child(elsewhere, memory) as (pid, directory):
        assert "for more than 8 MB" in file_excess(directory, FEW, pid, frozenset())
        assert file_excess(directory, FEW, pid, None) == ""


def test_what_cannot_be_seen_is_no_zero(tmp_path: Path) -> None:
    pid = os.getpid()
    with pytest.raises(OSError, match="No such"):
        thread_excess(2**22 + 1, 128)
    with child(tmp_path, "") as (_, directory), pytest.raises((Disturbed, OSError)):
        file_excess(directory, FEW, 2**22 + 1, frozenset())
    assert thread_excess(pid, 0) == "for more than 0 threads"


def test_a_first_thread_that_has_ended_is_seen(tmp_path: Path) -> None:
    code = "threading.Thread(target=lambda: (time.sleep(0.2), print(flush=True), time.sleep(60))).start()\n"
    with child(tmp_path, f"{code}ctypes.CDLL(None).syscall(60, 0)") as (pid, _):
        assert thread_excess(pid, None) == "because its first thread has ended"


@pytest.mark.parametrize("others", ["", "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"])
def test_a_killed_run_exceeds_nothing(tmp_path: Path, others: str) -> None:
    """The worker reports by which signal it ended; a look may come between that signal and the report."""
    with child(tmp_path, others) as (pid, directory):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert thread_excess(pid, 0 if others else 128) == ""
        assert file_excess(directory, FEW, pid, frozenset()) == ""


def test_a_directory_that_changes_during_a_look_is_noticed(tmp_path: Path) -> None:
    changes = {
        "a file is made": lambda: (tmp_path / "new").touch(),
        "a directory is replaced": lambda: ((tmp_path / "b").rmdir(), (tmp_path / "b").symlink_to("/")),
        "a directory is gone": lambda: (tmp_path / "a").rmdir(),
    }
    for change in changes.values():
        for name in "ab":
            with contextlib.suppress(OSError):
                (tmp_path / name).unlink()
            (tmp_path / name).mkdir(exist_ok=True)
        directory = os.open(tmp_path, os.O_RDONLY)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, directory)
            found = files_below(directory, opened, still=True)
            next(found)
            change()
            with pytest.raises(Disturbed):
                list(found)


REPLACEMENTS = {
    "a directory": "os.mkdir(name)",
    "a closed directory": "os.mkdir(name, 0)",
    "a file": "open(name, 'wb').close()",
    "a link to everything": "os.symlink('/', name)",
    "a link to itself": "os.symlink(name, name)",
    "a link to a closed directory of the server's user": "os.symlink(OUTSIDE, name)",
    "a directory of another": "os.rename(rng.choice(names), name)",
    "a place in another": "os.rename(name, rng.choice(names) + b'/in')",
    "a mode": "os.chmod(name, rng.choice((0, 0o100, 0o700)))",
    "a thread's name": "libc.prctl(15, rng.randbytes(15), 0, 0, 0)",
    "another descriptor": "os.dup2(rng.choice(range(3, 9)), rng.choice(range(3, 9)))",
}
DISTURBED = """
import ctypes, os, random, threading, time
libc, rng = ctypes.CDLL(None), random.Random({seed})
names = [b"d%d" % i + rng.choice([b"", b"\\xff", b"\\n", b") R 1"]) for i in range({number})]
kept = [open(f"kept{{i}}", "wb") for i in range(6)]
def disturb():
    while True:
        name = rng.choice(names)
        for action in (os.unlink, os.rmdir):
            try: action(name)
            except OSError: pass
        try: {action}
        except OSError: pass
for action in range({threads}):
    threading.Thread(target=disturb, daemon=True).start()
"""
ENDS = {
    "within": (
        "for i in range(5): open(f'f{i}', 'wb').write(bytes(1 << 20))\ntime.sleep(0.3); print('well')",
        "success",
    ),
    "beyond": (
        "os.mkdir('zz')\nfor i in range(24): open(f'zz/f{i}', 'wb').write(bytes(4 << 20))\n"
        "time.sleep(9); print('through')",
        "runtime_error",
    ),
    "endless": ("while True: time.sleep(0.001)", "timeout"),
}


class _Place(NamedTuple):
    run: Runner
    url: str
    outside: Path


@pytest.fixture(scope="module", params=EVERYWHERE)
def place(request: pytest.FixtureRequest) -> Iterator[_Place]:
    host: Host = request.param
    with contextlib.ExitStack() as stack:
        url, folder = stack.enter_context(server_of(host))
        outside = folder / "outside"
        outside.mkdir()
        if host.user is not None:
            os.chown(outside, host.user, -1)
        outside.chmod(0)
        yield _Place(stack.enter_context(runner(url)), url, outside)


@settings(max_examples=6, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    actions=st.lists(st.sampled_from(sorted(REPLACEMENTS)), min_size=1, max_size=3, unique=True),
    end=st.sampled_from(sorted(ENDS)),
    seed=st.integers(0, 2**32),
    number=st.sampled_from([1, 20, 400]),
    threads=st.integers(1, 3),
)
def test_whatever_a_second_thread_does_meanwhile_changes_no_verdict(
    place: _Place, actions: list[str], end: str, seed: int, number: int, threads: int
) -> None:
    before = health(place.url)["restarts"]
    doing = f"rng.choice([{', '.join(f'lambda: {REPLACEMENTS[action]}' for action in actions)}])()"
    code = DISTURBED.format(seed=seed, number=number, threads=threads, action=doing)
    program, status = ENDS[end]
    result = place.run(
        f"OUTSIDE = {str(place.outside)!r}\n{code}\n{program}", run_timeout_s=1 if status == "timeout" else 8
    )
    assert result.status == status, result
    ended_by = ("[killed for more than", "No space left on device")  # the kernel says the latter, at A and B
    assert status != "runtime_error" or any(reason in result.stderr for reason in ended_by), result
    assert health(place.url)["restarts"] == before
    assert place.outside.stat().st_mode & 0o777 == 0


ODD_DIRECTORIES = {
    "its own is closed": "os.mkdir('a'); os.chmod('.', 0)",
    "all are closed": "os.umask(0o777); os.mkdir('a'); open('f', 'w').close()",
    "very deep": "for i in range(3000): os.mkdir('d'); os.chdir('d')",
    "every byte in a name": "for i in set(range(1, 256)) - {46, 47}: os.mkdir(bytes([i]))",
    "long names": "for i in range(100): os.mkdir('n' * 250 + str(i).zfill(4))",
    "no name": "os.open('f', os.O_CREAT); os.remove('f')",
}


@pytest.mark.parametrize("name", ODD_DIRECTORIES)
def test_odd_directories_are_measured(place: _Place, name: str) -> None:
    before = health(place.url)["restarts"]
    result = place.run(f"import os, time\n{ODD_DIRECTORIES[name]}\ntime.sleep(0.1); print('well')")
    assert (result.status, result.stdout) == ("success", "well\n"), result
    assert health(place.url)["restarts"] == before
