"""A machine of its own for a program, with processes, network, shared memory and temporary files that no other has.

So what a run leaves behind is all that is there. Made of the kernel's namespaces, which takes root.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import shlex
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.support.prefork import PYTHONPATH, ROOT

WORK = Path("/tmp/work")
"""The run's own files, in memory."""
_FOLDERS = (Path("/tmp"), Path("/dev/shm"))
_CACHE = Path("/tmp", f"torchinductor_{getpass.getuser()}")
"""Of torch, for the next start."""
_TMP, _SHM = _FOLDERS
_MOUNTED = "mount -t tmpfs -o mode=1777 tmpfs"
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def reason_against() -> str:
    """Why none can be made here; "" where one can."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return "needs root and util-linux's unshare"
    tried = subprocess.run([*_unshared("true")], capture_output=True, text=True, timeout=20, check=False)
    return tried.stderr.strip()


def command(module: str, *arguments: str) -> list[str]:
    """`python -m module arguments` inside; `enter` is to be its first call."""
    program = shlex.join([sys.executable, "-m", module, *arguments])
    # The shell is the first process there, and so collects those that lose their parent.
    return _unshared(f"{program}; exit $?")


def _unshared(program: str) -> list[str]:
    namespaces = ["--mount", "--pid", "--net", "--ipc", "--fork", "--mount-proc", "--kill-child"]
    return ["unshare", *namespaces, "sh", "-c", " && ".join([*_mounts(), program])]


def _kept() -> list[Path]:
    """Folders of /tmp that stay: a checkout there, and its environment."""
    found = sorted(path for path in {ROOT, Path(sys.prefix)} if path.is_relative_to(_TMP))
    return [path for path in found if not any(other in path.parents for other in found)]


def _mounts() -> list[str]:
    """Commands that hide what others have in the folders of `_FOLDERS`."""
    kept = {str(path): str(_SHM / f"kept{number}") for number, path in enumerate(_kept())}
    before = [f"mkdir {aside} && mount --bind {shlex.quote(path)} {aside}" for path, aside in kept.items()]
    after = [
        f"mkdir -p {shlex.quote(path)} && mount --move {aside} {shlex.quote(path)} && rmdir {aside}"
        for path, aside in kept.items()
    ]
    return [f"{_MOUNTED} {_SHM}", *before, f"{_MOUNTED} {_TMP}", *after]


def enter() -> None:
    """Bring the network up, and make the folder of the run."""
    set_network(up=True)
    WORK.mkdir()


def set_network(*, up: bool) -> None:
    """Of this machine, which is all that its processes reach each other by; connections outlive a short cut."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP if up else 0))


class Left(NamedTuple):
    """Processes, by number and start, with their commands; and paths."""

    processes: dict[tuple[int, float], str]
    paths: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.processes or self.paths)

    def still(self) -> Left:
        """What of this is there now."""
        now = there()
        processes = {key: said for key, said in self.processes.items() if key in now.processes}
        return Left(processes, self.paths & now.paths)


def there() -> Left:
    """Everything that is there, but for ourselves, agents of Ray, and the folder of the run."""
    ours = {1, os.getpid()}
    processes = {
        (process.pid, process.info["create_time"]): " ".join(process.info["cmdline"] or [process.info["name"]])[:150]
        for process in psutil.process_iter(["cmdline", "name", "create_time", "status"])
        if process.pid not in ours
        and process.info["status"] != psutil.STATUS_ZOMBIE
        and not process.info["name"].startswith("ray::")  # Ray's agents stay for five minutes after their raylet
    }
    private = Path(f"/tmp/ctpo-{os.geteuid()}")
    kept = {_TMP / path.relative_to(_TMP).parts[0] for path in _kept()}
    paths = {path for folder in _FOLDERS for path in folder.iterdir()} - {WORK, private, _CACHE, *kept}
    paths |= set(private.iterdir()) if private.exists() else set()
    return Left(processes, frozenset(map(str, paths)))


def environment() -> dict[str, str]:
    """Variables of a run here."""
    return os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
