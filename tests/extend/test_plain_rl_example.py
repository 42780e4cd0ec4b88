"""examples/plain_rl: its files hold what docs/tutorials/own_model.md says, and its configuration reads them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.config import load_config
from tests.support.prefork import ROOT

EXAMPLE = ROOT / "examples" / "plain_rl"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("larger")
    runpy.run_path(str(EXAMPLE / "larger.py"))["main"](folder)
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_no_question_is_in_two_rows(files: dict[str, list[dict[str, Any]]]) -> None:
    asked = [(row.get("prompt") or row["messages"])[0]["content"] for rows in files.values() for row in rows]
    assert len(set(asked)) == len(asked)


def test_the_page_counts_the_rows(files: dict[str, list[dict[str, Any]]]) -> None:
    page = (ROOT / "docs" / "tutorials" / "own_model.md").read_text(encoding="utf-8")
    for name, rows in files.items():
        assert f"`{name}` ({len(rows):,}" in page


def test_the_configuration_names_the_files(files: dict[str, list[dict[str, Any]]]) -> None:
    config = load_config(EXAMPLE / "plain_rl.yaml")
    assert config.sft is not None
    named = [*config.data.train, *config.data.eval, *config.sft.data]
    assert {Path(str(path)).name for path in named} == set(files)
    assert not config.rollout.tools and config.rollout.max_turns == 1
