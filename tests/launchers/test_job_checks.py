"""Checks of a job: by `ctpo launch` before it submits, and by the node program before Ray starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ctpo_launchers.launch import job_problems
from ctpo_launchers.services import port_problems, secret_problems
from tests.support.deadlines import scaled


def texts(grace_s: float, signal_s: float | None, code: Path | None = None) -> list[str]:
    return [str(problem) for problem in job_problems(grace_s, signal_s, code)]


def checkout(folder: Path) -> Path:
    (folder / "code.py").write_text("1\n")
    who = ["-c", "user.name=me", "-c", "user.email=me@localhost"]
    for words in (["init", "-q"], ["add", "code.py"], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True, timeout=scaled(30))
    return folder


@pytest.mark.parametrize(("signal_s", "fits"), [(None, True), (600, True), (120, False), (60, False)])
def test_a_checkpoint_has_to_fit_between_the_signal_and_the_end(signal_s: float | None, fits: bool) -> None:
    found = texts(120.0, signal_s)
    assert found == [] if fits else "job gets its signal only" in found[0] and "raise signal_s" in found[0]
    assert fits or found[0].startswith("checkpoint.grace_s = 120.0: ")


def test_a_job_gets_committed_code_only(tmp_path: Path) -> None:
    code = checkout(tmp_path)
    assert texts(1.0, None, code) == []
    (code / "new.py").touch()  # what git does not know is not meant to run
    assert texts(1.0, None, code) == []
    (code / "code.py").write_text("2\n")
    (found,) = texts(1.0, None, code)
    assert found == "a job gets the code of the last commit; commit or put away first:\n M code.py"
    assert texts(1.0, None) == []


def test_code_without_git_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "is not a git checkout" in texts(1.0, None, tmp_path)[0]
    assert len(texts(120.0, 60, tmp_path)) == 2  # all that is wrong
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "No such file or directory: 'git'" in texts(1.0, None, tmp_path)[0]


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("secret", 0o600, None),
        ("secret", 0o640, "can be read or written by other users; type chmod 600"),
        (" \n", 0o600, "is empty: write a secret into it"),
        (b"\xff", 0o600, "cannot be made or read: 'utf-8'"),
        (None, 0o600, "cannot be made or read: [Errno 2]"),
        ("a folder", 0o700, "cannot be made or read: [Errno 21] Is a directory"),
    ],
)
def test_a_secret_is_a_file_that_its_owner_alone_reads(
    tmp_path: Path, content: str | bytes | None, mode: int, message: str | None
) -> None:
    file = tmp_path / "token"
    if content == "a folder":
        file.mkdir(mode)
    elif content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        file.chmod(mode)
    found = list(secret_problems(file))
    assert found == [] if message is None else len(found) == 1 and message in found[0]


def test_an_address_of_another_machine_is_named() -> None:
    """A port that is taken: test_node."""
    assert list(port_problems("127.0.0.2", 0)) == []
    (found,) = list(port_problems("192.0.2.1", 7))
    assert found.startswith("192.0.2.1 port 7: ") and "is it an address of this node (--address)?" in found
