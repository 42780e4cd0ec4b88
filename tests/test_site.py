"""The documentation site: every page is in its navigation, and what is generated is what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_megatron.config.keys import known_keys
from docs.site.reference import FOLDER, HAND_WRITTEN, pages
from tests.structure import GENERATED
from tests.support.deadlines import scaled
from tests.test_links import FORMS, documents

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "docs" / "index.md"
SECTIONS = ["Tutorials", "How-to", "Reference", "Explanation"]
TREE = re.compile(r"^```\{toctree\}\n:caption: (.*)\n(?::.*\n)*\n([^`]*)^```$", re.MULTILINE)


def navigation() -> dict[str, list[Path]]:
    """Section -> its pages, in order."""
    return {
        caption: [
            page for entry in entries.split() for form in FORMS for page in sorted(INDEX.parent.glob(f"{entry}.{form}"))
        ]
        for caption, entries in TREE.findall(INDEX.read_text(encoding="utf-8"))
    }


def test_every_page_is_in_the_navigation_once() -> None:
    found = [page.resolve() for section in navigation().values() for page in section]
    assert sorted(found) == [page for page in documents(ROOT) if page != INDEX]


def test_the_navigation_has_the_four_kinds_of_pages() -> None:
    assert list(navigation())[:4] == SECTIONS
    assert all(navigation().values())


def test_the_generated_pages_are_what_the_code_says() -> None:
    written = {page.name: page.read_text(encoding="utf-8") for page in FOLDER.glob("*.md")}
    assert written.keys() - pages().keys() == HAND_WRITTEN
    assert {name: written[name] for name in written.keys() - HAND_WRITTEN} == pages(), "run: make reference"
    assert {f"docs/reference/{name}" for name in pages()} <= set(GENERATED)


def test_the_reference_has_every_key_once() -> None:
    text = pages()["configuration.md"]
    assert [key.path for key in known_keys() if text.count(f"| `{key.path}` |") != 1] == []


def test_every_option_of_the_command_is_in_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ctpo_megatron.cli", "train", "--help"], capture_output=True, text=True, check=True
    )
    options = set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", done.stdout, re.MULTILINE))
    section = pages()["command_line.md"].partition("## ctpo train\n")[2].partition("\n## ")[0]
    assert len(options) > 5
    assert {option for option in options if option not in section} == {"--help"}


@pytest.mark.slow
@pytest.mark.network
def test_the_site_is_built_without_a_warning_is_complete_and_needs_no_network() -> None:
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=scaled(280))
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        pytest.skip("no package registry answers")
    assert done.returncode == 0, done.stderr
    site = ROOT / "build" / "site"
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"""<(?:script|img|iframe)[^>]*\bsrc=["'](?:https?:)?//[^"']*""", text) == [], page
        assert re.findall(r"""<link[^>]*rel=["']stylesheet["'][^>]*href=["'](?:https?:)?//[^"']*""", text) == [], page
        for place in re.findall(r"""\b(?:src|srcset)=["'](?!data:)([^"':?#]+)""", text):
            assert (page.parent / place).is_file(), f"{page} shows {place}"
    old = [page for page in (site / "docs").rglob("*.html") if "http-equiv" in page.read_text(encoding="utf-8")]
    assert len(old) > 30
    for page in old:
        (target,) = re.findall(r'content="0; url=([^"]+)"', page.read_text(encoding="utf-8"))
        file, _, anchor = target.partition("#")
        assert not anchor or f'id="{anchor}"' in (page.parent / file).read_text(encoding="utf-8"), page
    assert "quarantin" in (site / "searchindex.js").read_text(encoding="utf-8")
