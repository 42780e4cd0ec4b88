"""Temporary names: what killed processes left goes at the next start, and nothing else does."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from ctpo_sandbox import temporary
from tests.support import children
from tests.support.deadlines import scaled

MAKES = """
import multiprocessing, os, sys, tempfile, time
from pathlib import Path
from ctpo_sandbox import temporary
place = tempfile.tempdir = sys.argv[1]
temporary.private_folders = lambda: Path(sys.argv[2])
temporary.move_in()
lock = multiprocessing.get_context("spawn").Lock()
of_a_library = tempfile.mkdtemp()
folder = temporary.new_folder("ctpo-test-", place)
(folder / "deep" / "er").mkdir(parents=True)
(folder / "deep" / "er" / "file").write_text("x")
(folder / "link").symlink_to("/etc")
temporary.note(f"{place}/ctpo-test-file")
Path(place, "ctpo-test-file").write_text("x")
temporary.new_folder("ctpo-test-", place).rmdir()
{then}
os.write(1, f"made {multiprocessing.process.current_process()._config['semprefix']}\\n".encode())
time.sleep(600)
"""
MADE = 3
"""Names in its place, of which one is the folder of what libraries make."""
FORKS = """
begun, begins = os.pipe()
if (child := os.fork()) == 0:
    os.write(begins, b"x")
    time.sleep(600)
    os._exit(0)
os.read(begun, 1)
os.write(1, f"{child}\\n".encode())
"""
FILLS = """
import contextlib, os, sys, time
print(flush=True)
end = time.monotonic() + 0.7
while time.monotonic() < end:
    with contextlib.suppress(OSError):
        os.mkdir(f"{sys.argv[1]}/{time.monotonic_ns()}")
    time.sleep(0.01)
"""
ENDS = "import os\nfrom ctpo_sandbox import temporary as t\nwith t.folder('ctpo-test-') as f: print(f, os.getpid())"


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server that another test starts meanwhile sweeps the folders of the user."""
    folder = tmp_path_factory.mktemp("private") / "own"
    monkeypatch.setattr(temporary, "private_folders", lambda: folder)
    monkeypatch.setattr(temporary._Process, "folder", None)


@contextmanager
def maker(place: Path, then: str = "") -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that has made temporary names in `place`, and the lines that it said."""
    command = [sys.executable, "-c", MAKES.replace("{then}", then), str(place), str(temporary.private_folders())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("made"):
            line = process.stdout.readline()
            assert line, "it ended"
            lines.append(line.strip())
        yield process, lines
    finally:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """With its group, and so with multiprocessing's resource tracker."""
    children.end(process)
    process.wait(scaled(10))


def semaphores(lines: list[str]) -> list[Path]:
    prefix = lines[-1].split()[1].strip("/")
    return list(Path("/dev/shm").glob(f"sem.{prefix}*"))


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_what_a_killed_process_made_goes_with_the_next_start(tmp_path: Path) -> None:
    with maker(tmp_path) as (_, lines):
        pass
    assert len(names(tmp_path)) == MADE and len(semaphores(lines)) == 1  # a kill leaves them
    swept = temporary.sweep()
    assert names(tmp_path) == [] and semaphores(lines) == []
    assert len([path for path in swept if path.startswith(str(tmp_path))]) == MADE
    assert os.listdir("/etc")
    assert names(temporary.private_folders()) == []


def test_what_a_living_process_made_stays(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with maker(here) as (_, lines):
        with maker(there) as (_, others):
            pass
        temporary.sweep()
        assert (len(names(here)), len(semaphores(lines))) == (MADE, 1)
        assert (names(there), semaphores(others)) == ([], [])


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    with maker(tmp_path, FORKS) as (process, lines):
        os.kill(process.pid, signal.SIGKILL)
        process.wait(scaled(10))
        os.kill(int(lines[0]), 0)  # it is still there
        temporary.sweep()
        assert names(tmp_path) == []


def test_links_to_what_is_not_ours_remove_nothing(tmp_path: Path) -> None:
    foreign, other = tmp_path / "ctpo-foreign", tmp_path / "other"
    (foreign / "in").mkdir(parents=True)
    other.mkdir()
    with maker(tmp_path):
        (private,) = temporary.private_folders().iterdir()
        linked = [other, f"{tmp_path}/ctpo-x/../other", "ctpo-relative", f"{tmp_path}/*", "\udcff", f"{tmp_path}/ctpo-"]
        if os.geteuid() == 0:
            os.chown(foreign, 1000, 1000)
            linked.append(foreign)
        for number, name in enumerate(linked):
            (private / str(number)).symlink_to(name)
        (private / "no link").write_text(str(other))
    temporary.sweep()
    assert names(tmp_path) == ["ctpo-foreign", "other"] and names(temporary.private_folders()) == []


def test_a_process_that_ends_by_itself_leaves_nothing() -> None:
    said = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True).stdout.split()
    assert not Path(said[0]).exists() and list(Path(f"/tmp/ctpo-{os.geteuid()}").glob(f"{said[1]}-*")) == []


def test_without_a_private_folder_names_are_made_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Something else stands in its place."""
    taken = tmp_path / "taken"
    taken.write_text("")
    monkeypatch.setattr(temporary, "private_folders", lambda: taken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary.folder("ctpo-test-") as made:
        assert made.is_dir() and f"a later start will not remove {made}" in caplog.text
    assert temporary.sweep() == [] and names(tmp_path) == ["taken"]


def test_names_are_for_their_user_alone() -> None:
    with temporary.folder("ctpo-test-") as made:
        assert made.parent == Path(tempfile.gettempdir())
        for folder in (made, temporary.private_folders(), *temporary.private_folders().iterdir()):
            assert folder.stat().st_mode & 0o777 == 0o700


def test_what_a_dying_process_still_fills_is_waited_for(tmp_path: Path) -> None:
    """As Ray's last processes do, which outlive the trainer by moments."""
    with maker(tmp_path):
        pass
    (folder,) = (path for path in tmp_path.glob("ctpo-test-*") if path.is_dir())
    filler = subprocess.Popen([sys.executable, "-c", FILLS, str(folder)], stdout=subprocess.PIPE)
    assert filler.stdout is not None and filler.stdout.readline()
    temporary.sweep()
    assert filler.wait(scaled(10)) == 0
    assert names(tmp_path) == []


@pytest.mark.timeout(scaled(20))
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_listed_though_it_is_gone_is_not_waited_for_longer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As shared file systems may do. It stays noted."""
    noted, private = tmp_path / "ctpo-test-listed", temporary.private_folders() / "1-dead"
    noted.touch() if kind == "file" else noted.mkdir()
    private.mkdir(parents=True)
    (private / noted.name).symlink_to(noted)
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    monkeypatch.setattr(temporary, "SWEEP_PATIENCE_S", 0.2)
    if kind == "file":
        monkeypatch.setattr(os, "unlink", Mock(side_effect=gone))
    else:
        monkeypatch.setattr(temporary, "remove_whole", lambda path: None)
    assert temporary.sweep() == []
    assert "is left behind: " in caplog.text and str(private) in caplog.text and (private / noted.name).is_symlink()


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(temporary.getpass, "getuser", nobody)
    assert temporary._user() == f"uid_{os.getuid()}"


def test_a_sweep_leaves_what_its_own_process_made(tmp_path: Path) -> None:
    folder = temporary.new_folder("ctpo-test-", tmp_path)
    assert temporary.sweep() == [] and folder.exists()
