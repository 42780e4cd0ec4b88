"""The launcher's own environment: NeMo Run and its pinned packages cannot be installed together with vLLM.

Standard library only, since it runs with any Python that runs `ctpo launch`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ctpo_launchers import LaunchError
from ctpo_launchers.timeouts import INSTALL_TIMEOUT_S, RETRY_S

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements" / "launch.txt"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ctpo-megatron" / "venv-launch"
"""Not in the checkout: a dry run leaves that as it was, and it may be another user's."""


def launch(arguments: Sequence[str]) -> int:
    """Run `ctpo_launchers.launch` in the launcher's environment, which is created if missing."""
    python = _python()
    paths = [str(ROOT), *(str(ROOT / folder) for folder in ("answers", "kernels", "sandbox", "launchers"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CTPO_PYTHON": sys.executable}
    sys.stdout.flush()
    os.execve(python, [str(python), "-m", "ctpo_launchers.launch", *arguments], environment)


def need_checkout() -> None:
    """Raises LaunchError in an installed wheel, which has neither the code to pack nor the files of clusters."""
    if not REQUIREMENTS.is_file():
        raise LaunchError(f"ctpo launch works from a checkout: there is no {REQUIREMENTS}")


def _python() -> Path:
    """The interpreter of the environment for the current requirements/launch.txt."""
    need_checkout()
    wanted, stamp = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest(), FOLDER / "requirements.sha256"

    def made() -> bool:
        return stamp.is_file() and stamp.read_text() == wanted

    if not made():
        with _locked():
            if not made():  # another process may have created it meanwhile
                _make()
                stamp.write_text(wanted)
    return FOLDER / "bin" / "python"


@contextmanager
def _locked() -> Iterator[None]:
    """A lock among processes that would create the environment."""
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        lock = (FOLDER / "making.lock").open("a")
    except OSError as error:
        raise LaunchError(f"{FOLDER}: {error}") from error
    with lock:
        _acquire(lock)
        yield


def _acquire(lock: TextIO) -> None:
    deadline, announced = time.monotonic() + INSTALL_TIMEOUT_S, False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"another ctpo launch has been making {FOLDER} for {INSTALL_TIMEOUT_S:g} s; end it, and start again"
                ) from None
        except OSError as error:
            print(f"ctpo launch: {lock.name} cannot be locked ({error}): start no other one now", file=sys.stderr)
            return None
        if not announced:
            print(f"ctpo launch: waiting for another one, which makes {FOLDER}", file=sys.stderr)
            announced = True
        time.sleep(RETRY_S)


def _make() -> None:
    print(f"ctpo launch: making {FOLDER} (a minute, about 600 MB)", file=sys.stderr)
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(FOLDER)], [*pip, "--requirement", str(REQUIREMENTS)]):
        try:
            done = subprocess.run(command, stdout=sys.stderr, timeout=INSTALL_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"{' '.join(command)}: {error}") from error
        if done.returncode:
            raise LaunchError(f"{' '.join(command)} ended with status {done.returncode}; its output is above")
