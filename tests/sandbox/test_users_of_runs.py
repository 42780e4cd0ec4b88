"""Each server of root has user ids of its own for its runs: the kernel counts threads by user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_sandbox import SandboxServer, SandboxStartError
from ctpo_sandbox.isolation import users
from ctpo_sandbox.isolation.users import FREE, UserIds
from tests.sandbox.conftest import side_by_side
from tests.sandbox.other_users import HOSTS, Host, server_of
from tests.support.deadlines import scaled

pytestmark = [
    pytest.mark.xdist_group("sandbox-users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only a server of root gives runs users of their own"),
]
OF_ROOT = [Host("A", "namespaces-root"), *(host for host in HOSTS if host.user == 0)]
SLEEPERS = f"""
import os, threading, time
threading.stack_size(65536)
for _ in range(126): threading.Thread(target=time.sleep, args=[{scaled(3.0)}], daemon=True).start()
time.sleep({scaled(2.0)})
print(os.getuid(), threading.active_count())
"""
WORKERS = f"""
import os, threading, time
time.sleep({scaled(0.7)})
threads = [threading.Thread(target=abs, args=[1]) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(os.getuid(), len(threads))
"""


@pytest.mark.parametrize(
    "host",
    [pytest.param(host, id=host.name, marks=() if host.name == "A" else pytest.mark.slow) for host in OF_ROOT],
)
def test_threads_of_another_server_do_not_decide_a_verdict(host: Host) -> None:
    with server_of(host) as (one, _), server_of(host) as (two, _):
        many, few = asyncio.run(side_by_side((one, SLEEPERS), (two, WORKERS)))
    assert (many.status, few.status) == ("success", "success"), (many, few)
    (sleeper, threads), (worker, started) = (list(map(int, each.stdout.split())) for each in (many, few))
    assert (threads, started) == (127, 8)
    assert sleeper != worker
    usable = next(ids for ids in FREE if users._is_mapped(ids))
    assert sleeper in usable and worker in usable


def test_ids_of_a_killed_server_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "FREE", (range(61000, 61003),))
    hold = (
        "from ctpo_sandbox.isolation import users; users.FREE = (range(61000, 61003),)\n"
        "held = users.UserIds(2); print(*held.ids, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        held = set(map(int, server.stdout.readline().split()))
        with pytest.raises(OSError, match=r"2 user ids are needed.* only 1 of 61000 to 61002 are left .* lower"):
            UserIds(2)
        (left,) = UserIds(1).ids  # what a failed choice had taken is free as well
        assert {*held, left} == {61000, 61001, 61002}
        server.kill()
    with contextlib.closing(UserIds(3)) as ours:
        assert set(ours.ids) == {61000, 61001, 61002}


def test_ids_of_accounts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = {account.pw_uid for account in pwd.getpwall()}
    uid = max(each for each in accounts if each < 60000 and each + 1 not in accounts)
    monkeypatch.setattr(users, "FREE", (range(uid, uid + 2),))
    with contextlib.closing(UserIds(1)) as ours:
        assert ours.ids == (uid + 1,)
    with pytest.raises(OSError, match=f"only 1 of {uid} to {uid + 1} are left by other servers and accounts"):
        UserIds(2)


def test_a_server_without_enough_ids_does_not_start_with_less_isolation(tmp_path: Path) -> None:
    start = (
        "from ctpo_sandbox import server; from ctpo_sandbox.isolation import users\n"
        "users.FREE = (range(61004, 61006),); server.main()"
    )
    with pytest.raises(SandboxStartError, match=r"3 user ids are needed, .* only 2 of 61004 to 61005 are left"):
        SandboxServer([sys.executable, "-c", start, "--slots", "2"], tmp_path / "log", scaled(60))


@pytest.mark.parametrize(("mapped", "most"), [(1, 0), (65536, 478)])
def test_ids_that_a_user_namespace_does_not_have_are_not_given(mapped: int, most: int) -> None:
    look = (
        "import os, sys; ready = os.read(0, 1)\n"
        "from ctpo_sandbox.isolation import users\n"
        "print(len(users.UserIds(8).ids), next((len(r) for r in users.FREE if users._is_mapped(r)), 0))"
    )
    with subprocess.Popen(
        ["unshare", "--user", sys.executable, "-c", look], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as inside:
        assert inside.stdin is not None and inside.stdout is not None
        while os.readlink(f"/proc/{inside.pid}/ns/user") == os.readlink("/proc/self/ns/user"):
            assert inside.poll() is None
        for kind in ("uid", "gid"):
            Path(f"/proc/{inside.pid}/{kind}_map").write_text(f"0 0 {mapped}")
        inside.stdin.write(b"x")
        inside.stdin.flush()
        found = inside.stdout.read().split()
    assert found == [b"8" if most else b"0", str(most).encode()]
