"""A ledger of temporary names: each is noted before it is made, so that a later start removes what a kill has left.

The ledger of a process is a file that it keeps locked. The kernel gives that lock back however the process ends. A
process id would not do: another process may have got it since, or may be in another container.
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
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import process as processes
from multiprocessing.util import Finalize
from pathlib import Path

from ctpo_sandbox.remove import remove_tree, remove_whole
from ctpo_sandbox.timeouts import LEDGER_ATTEMPTS, SWEEP_PATIENCE_S, SWEEP_POLL_S

_log = logging.getLogger("ctpo_sandbox.temporary")
_OURS = ("ctpo-", "sem.ctpo-")
"""How the names begin that a ledger may hold: no other is ever removed."""
_SEMAPHORES = Path("/dev/shm")


def ledgers() -> Path:
    """The folder of this user's ledgers: not below TMPDIR, which may differ between two starts."""
    return Path(f"/tmp/ctpo-ledgers-{os.geteuid()}")


class _Ledger:
    """Of one process. Raises OSError where none can be kept."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._file, self.path = _locked_file()

    def add(self, name: str) -> None:
        self._names.add(name)
        if not os.fstat(self._file).st_nlink:  # something that cleans /tmp has removed it
            os.close(self._file)
            self._file, self.path = _locked_file()
        self._write()

    def remove(self, name: str) -> None:
        self._names.discard(name)
        self._write()

    def close(self) -> None:
        """Remove the ledger itself, unless something that it names is there."""
        if not any(map(_of_ours, self._names)):
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        """Killed in between, it leaves the end of an older text: names that are gone, and never come again."""
        text = "".join(f"{name}\n" for name in sorted(self._names)).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))


def _locked_file() -> tuple[int, Path]:
    folder = ledgers()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder of this user; remove it")
    for _ in range(LEDGER_ATTEMPTS):
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.lockf(file, fcntl.LOCK_EX)  # not flock: forked children would share it
        if os.fstat(file).st_nlink:
            return file, path
        os.close(file)  # a sweep has taken it before it was locked
    raise OSError(errno.EBUSY, f"{LEDGER_ATTEMPTS} new files were removed at once", folder)


class _Process:
    """The ledger of this process, and its lock. ledger: None before the first name; False where none can be kept."""

    lock = threading.Lock()
    ledger: _Ledger | bool | None = None
    own: Path | None = None
    """The latest ledger of this process: its lock does not keep this process itself out."""
    moved_in = False

    @classmethod
    def forget(cls) -> None:
        """A forked child keeps a ledger of its own."""
        cls.lock, cls.ledger, cls.own = threading.Lock(), None, None

    @classmethod
    def close(cls) -> None:
        if isinstance(cls.ledger, _Ledger):
            with contextlib.suppress(OSError):  # the next sweep does it
                cls.ledger.close()


os.register_at_fork(after_in_child=_Process.forget)


def note(name: str | Path) -> None:
    """Note a path that is about to be made; one that ends with `*` stands for all that begin so.

    Where no ledger can be kept, as on a full disk, that is logged once.
    """
    with _Process.lock:
        try:
            if _Process.ledger is None:
                _Process.ledger = _Ledger()
                # After everything of multiprocessing's, and so after what is noted.
                Finalize(None, _Process.close, exitpriority=-200)
            if isinstance(_Process.ledger, _Ledger):
                try:
                    _Process.ledger.add(str(name))
                finally:
                    _Process.own = _Process.ledger.path
        except OSError as error:
            _Process.ledger = False
            _log.warning("what this process makes is not removed by a later start, should it be killed: %s", error)


def forget(name: str | Path) -> None:
    """Take back a note, unless something of that name is still there: then a later start removes it."""
    with _Process.lock:
        if isinstance(_Process.ledger, _Ledger):
            with contextlib.suppress(OSError):  # the note stays, which does no harm
                if not _of_ours(str(name)):
                    _Process.ledger.remove(str(name))


def new_folder(prefix: str, parent: str | Path | None = None) -> Path:
    """A noted, empty folder of mode 0700 in `parent`, or in the temporary directory. Raises OSError."""
    path = _noted(prefix, "", parent)
    path.mkdir(0o700)
    return path


def new_file(prefix: str, suffix: str, parent: str | Path) -> tuple[int, Path]:
    """A noted, empty file of mode 0600: its descriptor, open for reading and writing, and its path. Raises OSError."""
    path = _noted(prefix, suffix, parent)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path


def _noted(prefix: str, suffix: str, parent: str | Path | None) -> Path:
    assert prefix.startswith(_OURS)
    path = Path(tempfile.gettempdir() if parent is None else parent, f"{prefix}{secrets.token_hex(6)}{suffix}")
    note(path)
    return path


@contextlib.contextmanager
def folder(prefix: str, parent: str | Path | None = None) -> Iterator[Path]:
    """`new_folder` for as long as the context lasts."""
    path = new_folder(prefix, parent)
    try:
        yield path
    finally:
        _give_back(path)


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
    Finalize(None, _give_back, args=(place,), exitpriority=-100)


def _user() -> str:
    """As torch names its folder: in a container a user need not have a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"


def _give_back(path: Path) -> None:
    remove_tree(str(path))
    forget(path)


def sweep() -> list[str]:
    """Remove what is noted in ledgers of processes that are gone; returns the paths.

    Ledgers of living processes stay, and names that other users have taken since.
    """
    swept: list[str] = []
    own = _Process.own
    try:
        found = [path for path in ledgers().iterdir() if path != own]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return swept
    for path in sorted(found):
        try:
            swept += _swept(path)
        except OSError as error:
            _log.warning("what a killed process has noted in %s is left behind: %s", path, error)
    if swept:
        _log.info("removed what killed processes had left: %s", ", ".join(swept))
    return swept


def _swept(ledger: Path) -> list[str]:
    try:
        file = os.open(ledger, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # another sweep was faster
        return []
    try:
        if not _is_abandoned(file):
            return []
        text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="surrogateescape")
        named = [line for line in text.split("\n") if _may_be_removed(line)]
        there = [path for name in named for path in _of_ours(name)]
        for path in there:
            _remove(path)
        if not any(map(_of_ours, named)):
            ledger.unlink(missing_ok=True)
        return there
    finally:
        os.close(file)


def _is_abandoned(ledger: int) -> bool:
    if os.fstat(ledger).st_uid != os.geteuid():
        return False
    try:
        fcntl.lockf(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # its process lives
        return False
    return True


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
