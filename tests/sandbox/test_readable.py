"""Programs read the interpreter and its libraries, and not the folders around them."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_sandbox.inside.libraries import PROMISED
from ctpo_sandbox.isolation.readable import readable_above, readable_files, readable_trees
from tests.sandbox.other_users import Host, runner_of

pytestmark = pytest.mark.xdist_group("sandbox-users")
LEVELS = [Host("A", "namespaces-root"), Host("B", "namespaces-user"), Host("C", "landlock")]
ANSWER = "forty-two, the ground truth"
LOOK = """
import os
for path in {paths}:
    try:
        print(open(path).read())
    except OSError:
        pass
    for above in (os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
        try:
            print(os.listdir(above))
        except OSError:
            pass
"""


@pytest.fixture(scope="module")
def answers() -> Iterator[list[str]]:
    """Files of data in the folder of the environment, and where images of containers keep programs."""
    name = f"ctpo-test-{os.getpid()}"
    folders = [
        Path(sys.prefix, name),
        *([Path("/usr/src", name), Path("/usr/share", name)] if os.geteuid() == 0 else []),
    ]
    for folder in folders:
        folder.mkdir()
        (folder / "train.jsonl").write_text(ANSWER)
    yield [str(folder / "train.jsonl") for folder in folders]
    for folder in folders:
        shutil.rmtree(folder)


@pytest.mark.parametrize("host", LEVELS, ids=lambda host: host.name)
def test_data_in_the_folder_of_the_environment_cannot_be_read(host: Host, answers: list[str]) -> None:
    assert [readable_above(path) for path in answers] == [None] * len(answers)
    imports = "".join(f"import {name}\n" for name in PROMISED)
    with runner_of(host, "--memory-mb", "2048") as run:
        found = run(LOOK.format(paths=answers))
        imported = run(f"{imports}print('all')")
    assert ANSWER not in found.stdout and found.status == "success", found
    assert "train.jsonl" not in found.stdout and os.path.basename(os.path.dirname(answers[0])) not in found.stdout
    assert imported.stdout == "all\n", imported


def test_the_library_and_the_packages_are_below_what_is_readable() -> None:
    paths = sysconfig.get_paths()
    of_installation = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for path in (*of_installation, os.__file__, pytest.__file__):
        assert readable_above(path) is not None, path
    assert os.path.realpath(sys.executable) in readable_files()
    assert not {sys.prefix, sys.base_prefix, "/usr", "/usr/local", "/", "/bin", "/usr/bin"} & set(readable_trees())


def test_a_link_is_followed(tmp_path: Path) -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    (tmp_path / "packages").symlink_to(site)
    assert readable_above(tmp_path / "packages" / "not-there" / "data.jsonl") == readable_above(site)
    assert readable_above(tmp_path / "data.jsonl") is None
