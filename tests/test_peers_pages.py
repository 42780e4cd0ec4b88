"""The pages for users of other trainers: every key and metric of ours that they name is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_megatron.config.keys import known_keys

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("from_verl.md", "from_trl.md", "from_nemo_rl_and_slime.md")
LEAST_ROWS = 25


def named(page: str, heading: str) -> Iterator[str]:
    """What the first column of the table under a heading names."""
    section = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE):
        yield from (name.partition(":")[0] for name in re.findall(r"`([^`]+)`", row))


@pytest.mark.parametrize("page", PAGES)
def test_our_keys_are_in_the_schema(page: str) -> None:
    keys = {key.path for key in known_keys()}
    sections = {path.rpartition(".")[0] for path in keys}
    found = list(named(page, "Configuration"))
    assert len(found) >= LEAST_ROWS
    assert [name for name in found if name not in keys | sections] == []


@pytest.mark.parametrize("page", PAGES)
def test_our_metrics_are_in_the_reference(page: str) -> None:
    reference = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    found = list(named(page, "Metrics"))
    assert len(found) >= 8
    assert [name for name in found if f"`{name}`" not in reference] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_version_that_was_read_is_named(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8").partition("\n## ")[0]
    assert re.search(r"\d+\.\d+\.\d", text)
