"""docs/howto and docs/tutorials: what a reader would type or save is run by a test, or the page says why not.

A comment before a block says which. `run`: the commands are run here, in a checkout with a finished run.
`example: NAME`: tests take it from the page. `tested: FILE`: this test does the same. `not run: REASON`.
docs/tutorials/own_reward.md needs none: all of it is typed by test_own_reward_tutorial.py.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ctpo_megatron.cli import main, parse
from ctpo_megatron.config import load_config
from ctpo_megatron.config.sources import read_overrides
from tests.extend.examples import DOCS, HOWTO, MOST_LINES, blocks
from tests.support.prefork import ROOT
from tests.tracking.synthetic_run import write_run

TYPED_WHOLE = DOCS / "tutorials" / "own_reward.md"
PAGES = sorted([*HOWTO.glob("*.md"), *(DOCS / "tutorials").glob("*.md")])
MARKED = [page for page in PAGES if page != TYPED_WHOLE]
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*) -->\n)?"
    r"(?:```(?P<kind>python|yaml|bash)\n(?P<fenced>.*?)^```$|(?P<indented>(?:^    \S[^\n]*\n)+))",
    re.MULTILINE | re.DOTALL,
)
SHOWN = "    ╭"
"""How the output of a command begins, which nobody types."""
LONGEST_SHORT_PAGE = 250
RUN = ("does_not_learn", "memory")
"""Pages with commands that are run here."""


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


def typed(page: Path) -> list[tuple[str, str, str]]:
    """(what the comment says, kind, text) of each block that a reader types or saves."""
    text = page.read_text(encoding="utf-8").replace("```\n```yaml", "```\n<!-- with the one above -->\n```yaml")
    found = (match.group("mark", "kind", "fenced", "indented") for match in BLOCK.finditer(text))
    given = [(mark or "", kind or "bash", fenced or indented) for mark, kind, fenced, indented in found]
    return [block for block in given if not block[2].startswith(SHOWN)]


def commands(text: str) -> list[str]:
    """The lines of a block, without what stands behind them."""
    return [line.split("  #")[0].strip() for line in text.splitlines()]


@pytest.mark.parametrize("page", MARKED, ids=name)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    for mark, kind, text in typed(page):
        what, _, rest = mark.partition(": ")
        if what == "example":
            code, _ = blocks(page, rest)
            assert len(code.splitlines()) <= MOST_LINES + 1
            assert any(f'"{rest}"' in test.read_text() for test in (ROOT / "tests").rglob("test_*.py")), rest
        elif what == "tested":
            assert [file for file in rest.split(", ") if not (ROOT / file).is_file()] == [], text
        else:
            assert (what == "not run" and rest) or mark in ("run", "with the one above"), f"{name(page)}: {text}"
        assert mark != "run" or (kind == "bash" and page.stem in RUN), name(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_of_ctpo_is_one(page: Path) -> None:
    """Verbs, options and the spelling of overrides."""
    for _, kind, text in typed(page):
        for line in commands(text) if kind == "bash" else ():
            if line.startswith("ctpo "):
                words = shlex.split(line)[1:]
                given = parse(words)
                _, problems = read_overrides([word for word in getattr(given, "overrides", ()) if "=" in word])
                assert problems == [], line


@pytest.mark.parametrize("page", MARKED, ids=name)
def test_every_configuration_is_one(page: Path, tmp_path: Path) -> None:
    """Keys and kinds of values of what a reader saves as YAML, over the quickstart's configuration."""
    for _, kind, text in typed(page):
        if kind == "yaml":
            (tmp_path / "own.yaml").write_text(f"defaults: {ROOT / 'configs' / 'quickstart.yaml'}\n{text}")
            load_config(tmp_path / "own.yaml")


@pytest.mark.parametrize("page", RUN)
def test_the_commands_that_need_no_more_are_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs").rename(tmp_path / "runs" / "quickstart")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    lines = [line for mark, _, text in typed(HOWTO / f"{page}.md") if mark == "run" for line in commands(text)]
    assert lines
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", ["does_not_learn", "memory", "preemption"])
def test_a_short_page_is_short(page: str) -> None:
    assert len((HOWTO / f"{page}.md").read_text(encoding="utf-8").split()) <= LONGEST_SHORT_PAGE


def test_every_key_that_a_page_names_is_one() -> None:
    """Keys in a sentence or a table, such as `policy.offload: all`. The blocks of examples have tests of their own."""
    rows = (DOCS / "config.md").read_text(encoding="utf-8").splitlines()
    known = {row.split("`")[1] for row in rows if row.startswith("| `")}
    sections = {key.partition(".")[0] for key in known}
    for page in HOWTO.glob("*.md"):
        named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", page.read_text(encoding="utf-8"))
        wrong = [key for key in named if key.partition(".")[0] in sections and key not in known]
        assert [key for key in wrong if not key.endswith(".py")] == [], page
