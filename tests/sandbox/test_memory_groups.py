"""Where a memory control group holds the memory of a run, it may map more than it uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ctpo_megatron.base.processes import wait_for
from ctpo_sandbox import Limits, SandboxServer, SandboxStartError
from ctpo_sandbox.isolation.control_groups import MemoryGroups, own_group
from tests.sandbox.conftest import Runner, runner, small_server
from tests.sandbox.sandbox_http import health
from tests.support.deadlines import scaled

LIMITS = Limits(memory_mb=128, disk_mb=16, address_space_mb=4096)
FIRST = "sandbox-memory"


def _offered() -> bool:
    try:
        MemoryGroups.find()
    except SandboxStartError:
        return False
    return True


grouped = pytest.mark.skipif(not _offered(), reason="no memory control group may be made here")


def _start(folder: Path) -> SandboxServer:
    return small_server(folder, limits=LIMITS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxServer]:
    with _start(tmp_path_factory.mktemp("memory")) as server:
        yield server


@pytest.fixture(scope="module")
def run(server: SandboxServer) -> Iterator[Runner]:
    with runner(server.url) as run:
        yield run


def _groups(server: int) -> list[Path]:
    return [found for found in Path("/sys/fs/cgroup").rglob(f"ctpo-sandbox-{server}-*") if found.is_dir()]


@grouped
@pytest.mark.xdist_group(FIRST)
@pytest.mark.parametrize(
    "code",
    [
        "import mmap; m = mmap.mmap(-1, 1 << 30); m[5] = 7; print(m[5])",
        "import threading; threading.stack_size(512 << 20)\n"
        "t = threading.Thread(target=print, args=[7]); t.start(); t.join()",
    ],
)
def test_large_untouched_mappings_cost_nothing(run: Runner, code: str) -> None:
    result = run(code)
    assert (result.status, result.stdout) == ("success", "7\n"), result


@grouped
@pytest.mark.xdist_group(FIRST)
@pytest.mark.parametrize(
    "code",
    ["x = bytearray(300 << 20)", "x = []\nwhile True: x.append(bytearray(1 << 20))", "open('f', 'w'); [0] * 10**8"],
)
def test_a_run_that_uses_more_is_ended_and_costs_no_other_its_worker(
    server: SandboxServer, run: Runner, code: str
) -> None:
    before = health(server.url)["restarts"]
    result = run(f"print('began', flush=True)\n{code}")
    assert (result.status, result.stdout) == ("runtime_error", "began\n")
    assert "[killed for more than 128 MB of memory]" in result.stderr
    assert run("print(1)").stdout == "1\n"
    assert health(server.url)["restarts"] == before


@grouped
@pytest.mark.xdist_group(FIRST)
def test_more_address_space_than_that_is_refused(run: Runner) -> None:
    assert "MemoryError" in run("x = bytearray(5 << 30)").stderr


@grouped
@pytest.mark.xdist_group(FIRST)
def test_groups_end_with_their_server_and_those_of_a_killed_one_with_the_next(tmp_path: Path) -> None:
    with _start(tmp_path) as server:
        killed = server.process.pid
        assert _groups(killed)
        process = psutil.Process(killed)
        family = process.children(recursive=True)
        process.kill()
        assert wait_for([process, *family], scaled(10)) == []
    with _start(tmp_path) as server:
        assert _groups(killed) == []
        last = server.process.pid
        assert _groups(last)
    assert _groups(last) == []


@pytest.mark.skipif(_offered(), reason="memory control groups may be made here")
def test_without_groups_the_server_says_so(tmp_path: Path) -> None:
    with pytest.raises(SandboxStartError, match=r"--address-space-mb .* needs memory control groups"):
        _start(tmp_path)


V1 = "36 25 0:31 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
INSIDE = "30 25 0:31 /docker/a /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"


@pytest.mark.parametrize(
    ("groups", "mounts", "expected"),
    [
        ("4:memory:/job/a\n0::/", V1, "/sys/fs/cgroup/memory/job/a"),
        ("4:memory:/docker/a/b\n0::/", INSIDE, "/sys/fs/cgroup/memory/b"),
        ("0::/user.slice/app.slice/run-1.scope", V2, "/sys/fs/cgroup/user.slice/app.slice/run-1.scope"),
        ("0::/", V2, "/sys/fs/cgroup"),
        ("0::/../other", V2, None),  # outside of what its namespace shows
        ("4:memory:/job\n0::/", V2, None),
        ("", "", None),
    ],
)
def test_the_own_group(groups: str, mounts: str, expected: str | None) -> None:
    found = own_group(groups, mounts)
    assert (None if found is None else os.path.normpath(found.path)) == expected


def _process(folder: Path, own: str, *, mount: str, slice_: str, is_root: bool, offered: str = "cpu memory") -> Path:
    """Its directory of /proc; `mount` and `slice_`: what /sys/fs/cgroup and its group system.slice pass on."""
    top = folder / "top"
    for group, passed_on in ((top, mount), (top / "system.slice", slice_)):
        group.mkdir()
        (group / "cgroup.controllers").write_text(offered)
        (group / "cgroup.subtree_control").write_text(passed_on)
        if group != top or not is_root:
            (group / "cgroup.type").write_text("domain\n")
    (folder / "cgroup").write_text(f"0::{own}\n")
    (folder / "mountinfo").write_text(V2.replace("/sys/fs/cgroup", str(top)))
    return folder


IN_SCOPE = "/system.slice/run-1.scope"


@pytest.mark.parametrize(
    ("own", "is_root", "mount", "slice_", "parent", "mount_after"),
    [
        (IN_SCOPE, True, "memory", "memory pids", "system.slice", "memory"),
        ("/", True, "", "", ".", "+memory"),
        ("/", True, "cpu memory", "", ".", "cpu memory"),
        ("/init", False, "", "", ".", "+memory"),  # a container whose processes were moved out of its topmost group
    ],
)
def test_groups_of_version_2_are_made_where_memory_is_passed_on(
    tmp_path: Path, own: str, is_root: bool, mount: str, slice_: str, parent: str, mount_after: str
) -> None:
    process = _process(tmp_path, own, mount=mount, slice_=slice_, is_root=is_root)
    assert os.path.normpath(MemoryGroups.find(process).parent) == os.path.normpath(tmp_path / "top" / parent)
    assert (tmp_path / "top" / "cgroup.subtree_control").read_text() == mount_after


@pytest.mark.parametrize(
    ("own", "offered", "reason"),
    [
        ("/", "cpu memory", r"top is the topmost group of this container .* move its processes"),
        (IN_SCOPE, "cpu memory", r"system\.slice/cgroup\.subtree_control does not name memory"),
        (IN_SCOPE, "cpu", r"system\.slice has no memory to pass on"),
    ],
)
def test_why_no_group_of_version_2_can_be_made(tmp_path: Path, own: str, offered: str, reason: str) -> None:
    process = _process(tmp_path, own, mount="cpu", slice_="pids", is_root=False, offered=offered)
    with pytest.raises(SandboxStartError, match=reason):
        MemoryGroups.find(process)
    assert (tmp_path / "top" / "system.slice" / "cgroup.subtree_control").read_text() == "pids"
