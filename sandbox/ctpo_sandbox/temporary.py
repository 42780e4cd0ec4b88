"""Temporary names: each is noted before it is made, so that a later start removes what a kill has left.

The notes of a process are links in a private folder, which it keeps locked. The kernel gives that lock back however the
process ends. A process id would not do: another process may have got it since, or may be in another container.
"""

import contextlib
import errno
import fcntl
import getpass
import glob
import itertools
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import process as processes
from multiprocessing.util import Finalize
from pathlib import Path

from ctpo_sandbox.isolation.remove import remove_tree, remove_whole
from ctpo_sandbox.timeouts import SWEEP_PATIENCE_S, SWEEP_POLL_S

_log = logging.getLogger("ctpo_sandbox.temporary")
_OURS = ("ctpo-", "sem.ctpo-")
"""How the names begin that may be noted: no other is ever removed."""
_SEMAPHORES = Path("/dev/shm")


def private_folders() -> Path:
    """Return where the private folders of this user's processes are: not below TMPDIR, which may differ between two
    starts.
    """
    return Path(f"/tmp/ctpo-{os.geteuid()}")


@contextlib.contextmanager
def _undisturbed() -> Iterator[Path]:
    """`private_folders`, where no other process makes a folder or takes one meanwhile. Raises OSError."""
    folder = private_folders()
    lock = _opened(folder)
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            raise PermissionError(f"{folder} is not a folder of this user; remove it")
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


class _Process:
    """The private folder of this process, and the descriptor by which it is locked; None before the first name."""

    busy = threading.Lock()
    folder: Path | None = None
    lock: int | None = None
    moved_in = False

    @classmethod
    def forget(cls) -> None:
        """Give a forked child its own folder, so that it does not keep its parent's locked."""
        if cls.lock is not None:
            os.close(cls.lock)
        cls.busy, cls.folder, cls.lock = threading.Lock(), None, None

    @classmethod
    def close(cls) -> None:
        """Remove the folder, unless something that it links to is there."""
        with contextlib.suppress(OSError):  # the next sweep does it
            if cls.folder is not None and not _there(cls.folder):
                shutil.rmtree(cls.folder)


os.register_at_fork(after_in_child=_Process.forget)


def note(name: str | Path) -> None:
    """Note a path that is about to be made; one that ends with `*` stands for all that begin so.

    Where that cannot be done, as on a full disk, it is logged.
    """
    with _Process.busy:
        try:
            if _Process.folder is None:
                _Process.folder, _Process.lock = _private_folder()
                # After everything of multiprocessing's, and so after what is noted.
                Finalize(None, _Process.close, exitpriority=-200)
            with contextlib.suppress(FileExistsError):
                (_Process.folder / os.path.basename(name)).symlink_to(name)
        except OSError as error:
            _log.warning("a later start will not remove %s, should this process be killed: %s", name, error)


def _private_folder() -> tuple[Path, int]:
    """A new one, and the descriptor by which it is locked. Raises OSError.

    The lock also keeps systemd from removing it for its age.
    """
    with contextlib.suppress(FileExistsError):
        private_folders().mkdir(0o700)
    with _undisturbed() as folders:  # no sweep takes it before it is locked
        folder = folders / f"{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir(0o700)
        lock = _opened(folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return folder, lock


def new_folder(prefix: str, parent: str | Path | None = None) -> Path:
    """Return a noted, empty folder of mode 0700 in `parent`, or in the temporary directory. Raises OSError."""
    assert prefix.startswith(_OURS)
    path = Path(tempfile.gettempdir() if parent is None else parent, f"{prefix}{secrets.token_hex(6)}")
    note(path)
    path.mkdir(0o700)
    return path


@contextlib.contextmanager
def folder(prefix: str) -> Iterator[Path]:
    """`new_folder` in the temporary directory for as long as the context lasts."""
    path = new_folder(prefix)
    try:
        yield path
    finally:
        remove_tree(str(path))


def move_in() -> None:
    """Note all that this process and its children make from now on in the temporary directory, and their semaphores.

    The directory is a folder of its own from then on, in the environment as well. Libraries leave files there that
    no other process removes. Compiled kernels stay where the next process finds them. A second call does nothing.
    """
    if _Process.moved_in:
        return
    _Process.moved_in = True
    mark = f"ctpo-{os.getpid()}-{secrets.token_hex(4)}"
    note(_SEMAPHORES / f"sem.{mark}*")
    processes.current_process()._config["semprefix"] = f"/{mark}"  # type: ignore[attr-defined]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{_user()}")
    place = new_folder("ctpo-")  # short, as paths of sockets have to be
    place.chmod(0o711)  # runs of the sandbox have other users, and their folders below
    tempfile.tempdir = os.environ["TMPDIR"] = str(place)
    # The priority of multiprocessing's own: its helpers end by messages through sockets there.
    Finalize(None, remove_tree, args=(str(place),), exitpriority=-100)


def _user() -> str:
    """As torch names its folder: in a container a user need not have a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"


def sweep() -> list[str]:
    """Remove what processes have noted that are gone; returns the paths.

    What living processes have noted stays, and names that other users have taken since.
    """
    try:
        with _undisturbed() as folders:
            found = sorted(path for path in folders.iterdir() if path.is_dir())
            abandoned = [(path, lock) for path in found if (lock := _taken(path)) is not None]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    swept: list[str] = []
    for path, lock in abandoned:
        try:
            swept += _swept(path)
        except OSError as error:
            _log.warning("what a killed process has noted in %s is left behind: %s", path, error)
        finally:
            os.close(lock)
    if swept:
        _log.info("removed what killed processes had left: %s", ", ".join(swept))
    return swept


def _taken(folder: Path) -> int | None:
    """The descriptor by which a private folder is now locked; None where its process lives, this one included."""
    lock = _opened(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _swept(folder: Path) -> list[str]:
    there = _there(folder)
    for path in there:
        _remove(path)
    if not _there(folder):
        shutil.rmtree(folder)
    return there


def _there(folder: Path) -> list[str]:
    """What there is of the names in a private folder."""
    names = [os.readlink(link) for link in folder.iterdir() if link.is_symlink()]
    return [path for name in names if _may_be_removed(name) for path in _of_ours(name)]


def _may_be_removed(name: str) -> bool:
    path = Path(name)
    return path.is_absolute() and ".." not in path.parts and path.name.startswith(_OURS)


def _of_ours(name: str) -> list[str]:
    """What there is of a noted name and belongs to this user."""
    paths = glob.glob(f"{glob.escape(name[:-1])}*") if name.endswith("*") else [name]
    return [path for path in paths if os.path.lexists(path) and os.lstat(path).st_uid == os.geteuid()]


def _remove(path: str) -> None:
    """Raises OSError. What dying processes still write to, or a control group that they are in, is waited for."""
    deadline = time.monotonic() + SWEEP_PATIENCE_S
    problem = OSError(errno.EBUSY, "it was removed, and is still listed", path)
    for attempt in itertools.count():
        if not os.path.lexists(path):
            return
        if time.monotonic() > deadline:
            raise problem
        if attempt:
            time.sleep(SWEEP_POLL_S)
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
            elif _is_control_group(path):
                os.rmdir(path)
            else:
                remove_whole(path)
        except OSError as error:  # FileNotFoundError, too, where a shared file system lists what is gone
            problem = error


def _is_control_group(path: str) -> bool:
    """A folder whose files cannot be removed, and need not be."""
    return os.path.exists(os.path.join(path, "cgroup.procs"))
