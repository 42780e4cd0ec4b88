"""CONTRIBUTING's first changes apply to the code as it is, in few files: a metric, a rule, a preset."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.prefork import ROOT

SECTION = re.compile(r"^## Your first change\n(.*?)^## ", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^\+\+\+ b/(\S+)$", re.MULTILINE)


def diffs() -> list[str]:
    section = SECTION.search((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert section is not None
    return re.findall(r"^```diff\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL)


def test_there_is_one_of_each_kind() -> None:
    assert [FILE.findall(diff)[0] for diff in diffs()] == [
        "ctpo_megatron/rollouts/metrics.py",
        "ctpo_megatron/config/rules.py",
        "ctpo_megatron/config/objective_schema.py",
    ]


@pytest.mark.parametrize("diff", diffs(), ids=lambda diff: FILE.findall(diff)[0])
def test_it_applies_in_few_files(diff: str, tmp_path: Path) -> None:
    names = FILE.findall(diff)
    assert 1 <= len(names) <= 3
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    command = ["git", "apply", "-"]
    done = subprocess.run(command, input=diff, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert (tmp_path / name).read_bytes() != (ROOT / name).read_bytes()
        if name.endswith(".py"):
            compile((tmp_path / name).read_text(encoding="utf-8"), name, "exec")
        if name.endswith(".toml"):
            tomllib.loads((tmp_path / name).read_text(encoding="utf-8"))
