"""Data sets of the Hub by name, from a cache that is laid out as huggingface_hub does; no network is asked."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ctpo_megatron import cli
from ctpo_megatron.checks import DataValidation
from ctpo_megatron.config import HubName
from ctpo_megatron.data import RowSet
from tests.data.rows import row, write
from tests.data.test_data_check import own
from tests.data.test_rendering import config, talk
from tests.support.deadlines import scaled

__all__ = ["own"]

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/test-*]}
- config_name: other
  data_files: other/*.parquet
---
# Questions
"""
FIRST, SECOND = "a" * 40, "b" * 40


class Cache:
    """`HF_HUB_CACHE`, into which data sets are put."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, repo: str, commit: str, files: Mapping[str, Any], ref: str = "main") -> None:
        """A commit with these files, rows or texts by name, which a branch points to."""
        place = self.folder / f"datasets--{repo.replace('/', '--')}"
        for name, content in files.items():
            file = place / "snapshots" / commit / name
            scratch = place / "blobs" / f"scratch{file.suffix}"
            if isinstance(content, str):
                scratch.parent.mkdir(parents=True, exist_ok=True)
                scratch.write_text(content)
            else:
                write(scratch, *content)
            blob = scratch.rename(scratch.with_name(hashlib.sha256(scratch.read_bytes()).hexdigest()))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.symlink_to(os.path.relpath(blob, file.parent))
        (place / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (place / "refs" / ref).write_text(commit)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Three data sets: with a card, with split names in the files, and converted by the Hub."""
    from huggingface_hub import constants

    made = Cache(tmp_path / "home" / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made.folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rows = {f"{subset}/{split}-00000-of-00001.parquet": [row(f"{subset} {split}")] for subset, split in SUBSETS}
    made.put("org/carded", FIRST, {"README.md": CARD, **rows})
    shards = {f"data/train-0000{n}-of-00002.parquet": [row(f"shard {n}")] for n in range(2)}
    test = {"data/test-00000-of-00001.parquet": [row("of the test")]}
    made.put("org/named", FIRST, {"README.md": "# No head\n", **shards, **test})
    made.put("org/converted", FIRST, {"rows.csv": "a,b\n"})
    made.put(
        "org/converted",
        SECOND,
        {"default/train/0000.parquet": [talk("q", "4"), talk("q", "5")]},
        ref="refs/convert/parquet",
    )
    return made


SUBSETS = (("main", "train"), ("main", "test"), ("other", "train"))


def questions(found: RowSet) -> list[str]:
    assert found.problems.lines == []
    return [messages[-1]["content"] for messages in found.messages]


def admitted(own: Path, name: str, key: str = "data.train", run: str = "run") -> RowSet:
    validation = DataValidation.of(config(own, f"{key}=[{name}]"), own / run)
    read: dict[str, Callable[[], RowSet]] = {"data.train": validation.training, "data.eval": validation.held_out}
    return read.get(key, validation.conversations)()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("org/carded:main/train", ["main train"]),
        ("org/carded:test", ["main test"]),
        ("org/carded:other/train", ["other train"]),
        ("org/named:train", ["shard 0", "shard 1"]),
        ("org/named:test@main", ["of the test"]),
        (f"org/named:test@{FIRST}", ["of the test"]),
    ],
)
@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_a_name_is_the_rows_of_its_split(own: Path, cache: Cache, name: str, shown: list[str], key: str) -> None:
    assert questions(admitted(own, name, key)) == shown


def test_conversations_of_a_conversion(own: Path, cache: Cache) -> None:
    found = admitted(own, "org/converted", "sft.data")
    (file,) = found.rows
    assert questions(found) == ["4", "5"] and file.match(f"snapshots/{SECOND}/default/train/0000.parquet")


REFUSED = [
    ("org/carded", "holds several splits; name one: org/carded:main/train, org/carded:main/test, org/carded:other/tr"),
    ("org/carded:main/dev", "the data set has no such split; name one: org/carded:main/train, org/carded:main/test"),
    ("org/named", "holds several splits; name one: org/named:test, org/named:train"),
    ("org/named:dev@main", "name one: org/named:test@main, org/named:train@main"),
    (
        "org/none:train",
        "and the Hub cannot be asked: HF_HUB_OFFLINE is set; unset HF_HUB_OFFLINE, or where there is",
    ),
    ("org/named@v9", "unset HF_HUB_OFFLINE, or where there is a network: hf download org/named --repo-type dataset --"),
    ("org/converted@main", "holds no parquet files; leave out the revision, for the Hub's conversion to parquet, or"),
    ("org/partial:train", "the Hub cannot be asked: 1 files are missing; unset"),
]


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_what_cannot_be_had_is_refused_with_key_name_and_remedy(
    own: Path, cache: Cache, name: str, message: str
) -> None:
    cache.put("org/partial", FIRST, {"data/train-00001-of-00002.parquet": [row()]})
    (line,) = admitted(own, name).problems.lines
    assert line.startswith(f"data.train {name}: ") and message in line


class Hub(BaseHTTPRequestHandler):
    """Refuses every request as the Hub does, for the reason that the name of the data set is."""

    def do_GET(self) -> None:
        reason = self.path.split("/")[4]
        self.send_response(403 if reason == "GatedRepo" else 404)
        self.send_header("X-Error-Code", reason)
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("reason", "message", "remedy"),
    [
        (
            "GatedRepo",
            "is gated: the Hub asks who reads it; accept its terms",
            "log in (`hf auth login`, or HF_TOKEN)",
        ),
        (
            "RepoNotFound",
            "there is no such file, and the Hub has no such data set, or a private one",
            "correct the name",
        ),
        ("RevisionNotFound", "the data set has no revision 'v2'", "name a branch, a tag or a commit of it"),
        ("Trouble", "the Hub cannot be asked: ", "where there is a network: hf download org/Trouble"),
    ],
)
def test_what_the_hub_refuses(
    own: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, reason: str, message: str, remedy: str
) -> None:
    from huggingface_hub import constants

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
        (line,) = admitted(own, f"org/{reason}:train@v2").problems.lines
        server.shutdown()
    assert line.startswith(f"data.train org/{reason}:train@v2: ") and message in line and remedy in line
    assert "hf_abc" not in line


def test_a_resumed_run_reads_the_commit_that_it_began_with(own: Path, cache: Cache) -> None:
    assert questions(admitted(own, "org/named:test")) == ["of the test"]
    kept = json.loads((own / "run" / "rendering.json").read_text())["rows"]["train"]
    assert kept["org/named:test"] == FIRST
    cache.put("org/named", SECOND, {"test.parquet": [row("newer")]})
    assert questions(admitted(own, "org/named:test")) == ["of the test"]
    assert questions(admitted(own, "org/named:test", run="other")) == ["newer"]


def test_a_dry_run_says_the_key_once(own: Path, cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "own.yaml", "--dry-run", "data.eval=[org/none:test]"]) == 2
    assert "data.eval: org/none:test: is no file here, nor complete in " in capsys.readouterr().err


def test_programs_must_not_read_the_cache(own: Path, cache: Cache) -> None:
    """Links are followed: the rows are in a file of the interpreter's library."""
    file = cache.folder / "datasets--org--named" / "snapshots" / FIRST / "library.parquet"
    file.symlink_to(Path(pytest.__file__))
    (line,) = admitted(own, "org/named:library").problems.lines
    assert line.startswith("data.train org/named:library: is kept below /") and line.endswith(
        "set HF_HOME to another folder"
    )


def test_weights_are_of_names_too(own: Path, cache: Cache) -> None:
    train = "data.train=[{path: 'org/named:train', weight: 3}, {path: 'org/named:test', weight: 1}]"
    found = DataValidation.of(config(own, train), own / "run").training()
    mixed = found.mix(["org/named:train", "org/named:test"])  # type: ignore[attr-defined]
    assert [[prompt.messages[-1]["content"] for prompt in prompts] for prompts in mixed] == [
        ["shard 0", "shard 1"],
        ["of the test"],
    ]


def test_a_path_wins(own: Path, cache: Cache) -> None:
    write(own / "org" / "named" / "train.jsonl", row("a file"))
    assert questions(admitted(own, "org/named")) == ["a file"]
    write(own / "org" / "named:test" / "a.jsonl", row("with a colon"))
    assert questions(admitted(own, "org/named:test", run="other")) == ["with a colon"]
    for path in ("org/absent", "a/b/c.parquet", "absent/train.parquet", "x.jsonl", "a/b/c"):
        assert HubName.of(path) is None  # the first: `org` is a folder here


def test_a_dry_run_names_the_files(own: Path, cache: Cache) -> None:
    """As a user starts it, with the environment of huggingface_hub."""
    env = {**os.environ, "HF_HOME": str(cache.folder.parent), "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_secretsecret"}
    command = [sys.executable, "-m", "ctpo_megatron.cli", "train", "own.yaml", "--dry-run"]
    names = ["data.train=[org/named:train]", "data.eval=[org/carded:main/test]"]
    done = subprocess.run([*command, *names], env=env, capture_output=True, text=True, timeout=scaled(200))
    shown = " ".join(done.stdout.split())
    assert done.returncode == 0 and "hf_secret" not in done.stdout + done.stderr, done.stderr
    snapshot = cache.folder / "datasets--org--named" / "snapshots" / FIRST / "data"
    assert f"2 files org/named:train: {snapshot}/train-00000-of-00002.parquet, {snapshot}/train-00001" in shown
    assert f"1 files org/carded:main/test: {cache.folder}" in shown
