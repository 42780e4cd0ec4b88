"""Every attack at every level of isolation that this machine offers and that promises to stop it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ctpo_sandbox import Limits, SandboxServer, SandboxStartError
from ctpo_sandbox.records import LEVELS
from ctpo_sandbox.server.selftest import PROMISES
from tests.sandbox.attacks import ATTACKS, ESCAPED, ODDITIES, TRACES, Attack
from tests.sandbox.conftest import server_in_memory, wait_until
from tests.sandbox.sandbox_http import health, post
from tests.support.deadlines import scaled

X86_ONLY = {"libc.syscall", "prot=7"}
OF_THE_BOX = {
    *("home directory", "listing /", "listing /etc", "listing /usr", "listing /usr/share", "listing /usr/local"),
    *("the folder around its packages", "the folder around its library", "programs of its environment"),
} | {
    f"reading /proc/{name}"
    for name in ["kallsyms", "1/cmdline", "net/tcp", "self/mountinfo", "self/net/unix", "sys/kernel/random/boot_id"]
}
"""What a run in namespaces may read where the kernel has no Landlock; test_neighbours.py says what that is."""

SHORT_S = scaled(0.2)
MAX_GROWTH = 100 * 2**20


@dataclass(frozen=True)
class Target:
    """A server at one level."""

    server: SandboxServer

    def run(self, code: str, run_timeout_s: float = scaled(8)) -> dict[str, Any]:
        reply: dict[str, Any] = post(self.server, {"code": code, "run_timeout": run_timeout_s}).json()
        return reply

    def assert_well(self) -> None:
        """Idle once the files of the run are gone, and no process of it is left."""

        def idle() -> dict[str, Any]:
            found = health(self.server.url)
            return found if found["idle"] == found["slots"] else {}

        found = wait_until(idle, "the run to be gone")
        assert found["status"] == "ok" and found["restarts"] == 0
        workers = [psutil.Process(pid) for pid in found["workers"] if pid is not None]
        assert [worker.children() for worker in workers] == [[] for _ in workers]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Target | SandboxStartError | str]]:
    """One server per level, started at its first use; none may have grown at the end."""
    options = {"slots": 1, "limits": Limits(memory_mb=384), "start_timeout_s": scaled(60), "require": "none"}
    options["tiers"] = ["stdlib", "numpy"]
    with contextlib.ExitStack() as servers:

        @functools.cache
        def start(level: str) -> Target | SandboxStartError | str:
            log: Path = tmp_path_factory.mktemp(f"attacks-{level}") / "log"
            try:
                server = servers.enter_context(server_in_memory(**options, log_path=log, level=level))
            except SandboxStartError as error:
                if "self-test" in str(error):  # it offers the level, and the level does not hold
                    return error
                return f"this machine does not offer {level}: {error}"[:300]
            before = psutil.Process(server.process.pid).memory_info().rss
            servers.callback(_assert_not_grown, server, before)
            return Target(server)

        yield start


def _assert_not_grown(server: SandboxServer, before: int) -> None:
    assert psutil.Process(server.process.pid).memory_info().rss - before < MAX_GROWTH


@pytest.fixture
def target(request: pytest.FixtureRequest, targets: Callable[[str], Target | SandboxStartError | str]) -> Target:
    found = targets(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    if isinstance(found, SandboxStartError):
        raise found
    return found


def runnable(level: str, attack: Attack) -> bool:
    """Whether the level promises to stop it; where it does not, the snippet would do its harm here."""
    other_numbers = os.uname().machine != "x86_64" and any(mark in attack.code for mark in X86_ONLY)
    return (not attack.needs or attack.needs in PROMISES[level]) and not other_numbers


GROUPS = {level: pytest.mark.xdist_group(f"sandbox-{letter}") for level, letter in zip(LEVELS, "ABCD", strict=True)}
BREADTH = {level: [pytest.mark.slow] for level in LEVELS if level not in ("namespaces-root", "landlock")}
"""Of `make test-slow`: two levels have all mechanisms, and others have some of them."""
CASES = [
    pytest.param(level, attack, id=f"{level}-{attack.name}", marks=[GROUPS[level], *BREADTH.get(level, ())])
    for level in LEVELS
    for attack in ATTACKS
    if runnable(level, attack)
]
EVERY_LEVEL = pytest.mark.parametrize(
    "target",
    [pytest.param(level, marks=[group, *BREADTH.get(level, ())]) for level, group in GROUPS.items()],
    indirect=True,
)


def test_names_are_unique_and_there_are_enough() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names) >= 220


@pytest.mark.parametrize(("target", "attack"), CASES, indirect=["target"])
def test_attack(target: Target, attack: Attack) -> None:
    if attack.name in OF_THE_BOX and "landlock" in target.server.health["missing"]:
        pytest.skip("without Landlock a run may read its own box and its own /proc: SECURITY.md")
    reply = target.run(attack.code, SHORT_S if attack.timeout else scaled(8))
    assert reply["status"] == ("timeout" if attack.timeout else "runtime_error"), reply
    assert ESCAPED not in reply["run_result"]["stdout"]
    assert all(len(reply["run_result"][stream]) < 1_001_000 for stream in ("stdout", "stderr"))
    target.assert_well()


@EVERY_LEVEL
@pytest.mark.parametrize("name", ODDITIES)
def test_oddity(target: Target, name: str) -> None:
    code, status, stdout = ODDITIES[name]
    reply = target.run(code)
    assert reply["status"] == status, reply
    if stdout is not None:
        assert reply["run_result"]["stdout"] == stdout
    target.assert_well()


@EVERY_LEVEL
@pytest.mark.parametrize("name", TRACES)
def test_nothing_is_left_for_the_next_run(target: Target, name: str) -> None:
    if name == "a file in /tmp" and "file writes" not in PROMISES[target.server.health["level"]]:
        return  # the level does not keep runs apart there
    leave, look = TRACES[name]
    assert target.run(leave)["status"] == "success"
    assert target.run(look)["run_result"]["stdout"] == "[]\n"
    target.assert_well()


BEFORE = {
    "a line": "print('start')",
    "half a line": "print('start', end='')",
    "several": "print('sta', end=''); print('rt', sep='')",
    "a character": "import sys; sys.stdout.write('start'[:4]); sys.stdout.write('t')",
    "bytes": "import sys; sys.stdout.buffer.write(b'start')",
    "with a file as target": "import sys; print('start', file=sys.__stdout__)",
}
ENDLESS = {"python": "while True: pass", "c": "pow(73, 99855421)", "sleep": "import time; time.sleep(60)"}


@EVERY_LEVEL
@pytest.mark.parametrize("loop", ENDLESS)
@pytest.mark.parametrize("way", BEFORE)
def test_output_before_a_time_limit_is_kept_without_flush(target: Target, way: str, loop: str) -> None:
    for limit_s in (SHORT_S, 10 * SHORT_S):  # on a busy machine a program may not begin before the first
        reply = target.run(f"{BEFORE[way]}\n{ENDLESS[loop]}", limit_s)
        assert reply["status"] == "timeout", reply
        if reply["run_result"]["stdout"]:
            break
    assert reply["run_result"]["stdout"].rstrip("\n") == "start"


@EVERY_LEVEL
def test_output_before_another_end_is_kept_too(target: Target) -> None:
    for end in ("import os; os._exit(3)", "import os; os.abort()", "import ctypes; ctypes.string_at(0)"):
        reply = target.run(f"import sys\nprint('start')\nprint('why', end='', file=sys.stderr)\n{end}")
        assert (reply["status"], reply["run_result"]["stdout"]) == ("runtime_error", "start\n"), (end, reply)
        assert reply["run_result"]["stderr"].startswith("why")
