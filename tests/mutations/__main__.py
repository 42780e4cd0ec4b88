"""Plants bugs and runs the tests that must see them: python -m tests.mutations [--only ID ...] [--jobs 2].

Bugs are the tables `[[mutation]]` of the TOML files beside this one: `id`; `file` and the text `old` in it, there once,
that `new` replaces; `tests`, node ids of pytest of which one has to fail; `why`, what is wrong. Each is applied in a
copy of the tree. Exit status 1 when a bug survives, or when its tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tests.support.prefork import ROOT, SHARED, Client, Prefork

DEADLINE_S = 900.0
PACKAGES = (".", "answers", "kernels", "sandbox", "launchers")
PRELOADED = ("pytest", "tests.conftest", "tests.mutations.preload")
"""By the server of test processes. What it holds of ours is loaded again, as bugs are planted there."""
OPTIONS = ("-x", "-q", "-m", "not gpu", "-p", "no:cacheprovider", "--tb=line", "-rf")
PROGRAM = """
import sys
sys.path[:0] = folders
for name in [name for name in sys.modules if name.partition(".")[0].startswith(("tests", "ctpo_"))]:
    del sys.modules[name]  # those of the copy are to be imported: tests.conftest has loaded some of ours
import pytest
sys.exit(pytest.main(arguments))
"""
PASSED, FAILED = 0, 1  # pytest's exit statuses; any other says that it could not run the tests


@dataclass(frozen=True)
class Mutation:
    id: str
    file: str
    old: str
    new: str
    tests: list[str]
    why: str


@dataclass(frozen=True)
class Verdict:
    """of: "unchanged" or the id of a bug. good: as it has to be. detail: the test that saw it, or what happened."""

    of: str
    good: bool
    detail: str
    seconds: float


def load() -> list[Mutation]:
    """All bugs, by file and place. Raises ValueError when a text is not there exactly once, or an id is used twice."""
    found = [
        Mutation(**table)
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    ]
    for mutation in found:
        count = (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old)
        if count != 1:
            raise ValueError(f"{mutation.id}: `old` is {count} times in {mutation.file}; it has to be there once")
    ids = [mutation.id for mutation in found]
    if repeated := {name for name in ids if ids.count(name) > 1}:
        raise ValueError(f"these ids are used twice: {', '.join(sorted(repeated))}")
    return found


def copy_tree(target: Path) -> None:
    """The files of the working tree that git does not ignore, as a checkout: tests ask git which files there are."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for command in (("init", "--quiet"), ("add", "--all")):
        subprocess.run(["git", *command], cwd=target, check=True)


def run_tests(server: Client, tree: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pytest in a copy of the tree, whose packages come before those that are installed."""
    folders = [str(tree / folder) for folder in PACKAGES]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), SHARED: server.address}
    program = {"__name__": "__main__", "folders": folders, "arguments": [*OPTIONS, *tests]}
    return server.run(exec, PROGRAM, program, deadline_s=DEADLINE_S, environment=environment, directory=tree)


def judge(of: str, done: subprocess.CompletedProcess[str], expected: int, began: float) -> Verdict:
    failed = [line.split(" - ")[0].removeprefix("FAILED ") for line in done.stdout.splitlines() if line[:6] == "FAILED"]
    good = done.returncode == expected
    detail = (
        (", ".join(failed) or ("passed" if of == "unchanged" else "an error before the test"))
        if good
        else f"pytest: status {done.returncode}; {done.stdout[-1500:]}"
    )
    return Verdict(of, good, detail, time.monotonic() - began)


def plant(server: Client, tree: Path, mutation: Mutation) -> Verdict:
    began = time.monotonic()
    path = tree / mutation.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        return judge(mutation.id, run_tests(server, tree, mutation.tests), FAILED, began)
    except AssertionError as error:  # it ran into the deadline, which is not what its tests are there for
        return Verdict(mutation.id, False, str(error)[:1500], time.monotonic() - began)
    finally:
        path.write_text(text, encoding="utf-8")


def run(mutations: Sequence[Mutation], jobs: int) -> list[Verdict]:
    """The tests as they are, and then with each bug; `jobs` bugs at a time."""
    with (
        closing(Prefork(PRELOADED)) as server,
        tempfile.TemporaryDirectory(prefix="mutations-") as folder,
        ThreadPoolExecutor(jobs) as threads,
    ):
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copy_tree(Path(folder) / str(number))
            trees.put(Path(folder) / str(number))

        def report(verdict: Verdict) -> Verdict:
            print(
                f"{'ok  ' if verdict.good else 'FAIL'} {verdict.of:44} {verdict.seconds:6.1f} s  {verdict.detail}",
                flush=True,
            )
            return verdict

        def one(mutation: Mutation) -> Verdict:
            tree = trees.get()
            try:
                return report(plant(server, tree, mutation))
            finally:
                trees.put(tree)

        began = time.monotonic()
        tests = sorted({test for mutation in mutations for test in mutation.tests})
        unchanged = report(judge("unchanged", run_tests(server, Path(folder) / "0", tests), PASSED, began))
        return [unchanged, *threads.map(one, mutations)] if unchanged.good else [unchanged]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="ids, or beginnings of ids")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time (default 2)")
    arguments = parser.parse_args()
    chosen = [m for m in load() if arguments.only is None or m.id.startswith(tuple(arguments.only))]
    if not chosen:  # pytest would take no tests for all of them
        parser.error(f"--only: no bug has an id that begins with {', '.join(arguments.only)}")
    verdicts = run(chosen, arguments.jobs)
    caught = sum(verdict.good for verdict in verdicts[1:])
    print(
        f"{caught} of {len(chosen)} planted bugs are caught, in {sum(v.seconds for v in verdicts):.0f} s of test runs"
    )
    return 0 if all(verdict.good for verdict in verdicts) and caught == len(chosen) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
