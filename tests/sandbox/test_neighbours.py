"""Two runs at once see nothing of each other, also where the kernel has no Landlock."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from ctpo_sandbox import ExecutionResult, SandboxClient, SandboxServer, SandboxStartError
from tests.support.deadlines import scaled

START_AS_ON_LINUX_5_11 = """
import errno, runpy, sys
import pyseccomp
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
for name in ("landlock_create_ruleset", "mount_setattr"):
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), name)
rules.load()
sys.argv = ["ctpo_sandbox.server", *sys.argv[1:]]
runpy.run_module("ctpo_sandbox.server", run_name="__main__")
"""
"""What Linux before 5.12 answers: it has neither Landlock (5.13) nor mount_setattr."""

SECRET = "the-answer-is-" + "forty-two"
HOLD = f"""
import time
secret = {SECRET!r} * 3
file = open("secret", "w")
file.write(secret)
file.flush()
time.sleep({scaled(2.0)})
print("held")
"""
LOOK = f"""
import os, time
wanted = ("the-answer-is-" + "forty-two").encode()
own = {{str(os.getpid()), str(os.getppid())}}
found = set()

def look(process):
    for name in ("cwd/secret", "root/work/run/secret", "environ", "fd/3"):
        try:
            if wanted in open(f"/proc/{{process}}/{{name}}", "rb").read():
                found.add(name)
        except OSError:
            pass
    try:
        memory = open(f"/proc/{{process}}/mem", "rb")
        for line in open(f"/proc/{{process}}/maps"):
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if "rw" in line and end - start < 1 << 24:
                memory.seek(start)
                if wanted * 3 in memory.read(end - start):
                    found.add("memory")
    except OSError:
        pass

end = time.monotonic() + {scaled(1.0)}
while time.monotonic() < end:
    for process in os.listdir("/proc"):
        if process.isdigit() and process not in own:
            found.add("process")
            look(process)
    time.sleep(0.02)
print(sorted(found))
"""


@pytest.mark.xdist_group("sandbox-B")
@pytest.mark.parametrize("level", ["namespaces-root", "namespaces-user"])
def test_neighbours_are_invisible_without_landlock(tmp_path: Path, level: str) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", START_AS_ON_LINUX_5_11, "--slots", "2", "--level", level, "--tiers", "stdlib"]
    try:
        server = SandboxServer(command, log, scaled(60))
    except SandboxStartError as error:
        if "Operation not permitted" not in str(error):
            raise
        pytest.skip(f"this machine does not offer {level}")
    with server:
        assert "landlock" in server.health["missing"]
        held, looked = asyncio.run(_both(server.url))
    assert held.stdout == "held\n", held
    assert looked.stdout == "[]\n", looked


async def _both(url: str) -> list[ExecutionResult]:
    client = SandboxClient(url, max_concurrency=2, request_timeout_s=scaled(40))
    limit_s = scaled(20.0)
    results = await asyncio.gather(client.run(HOLD, run_timeout_s=limit_s), client.run(LOOK, run_timeout_s=limit_s))
    await client.aclose()
    return results
