"""Pages with commands: what a reader would type or save is run by a test, or the page says why not.

A comment before a block says which:

    run              the commands are run here, in a checkout with finished runs
    dry run: REASON  so are those of `ctpo`, with --dry-run
    example: NAME    tests take the block from the page
    tested: FILES    these tests, which exist, do the same
    not run: REASON  so do the tests that it names
"""

from __future__ import annotations

import glob
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_megatron.cli import main, parse
from ctpo_megatron.config import load_config
from ctpo_megatron.config.load import check_override
from tests.extend.document_examples import DOCS, EXTENDING, MOST_LINES, blocks
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT
from tests.support.task import SMALL_TASK, task_folder
from tests.tracking.synthetic_run import write_run

OF_A_RUN = [DOCS / f"{name}.md" for name in ("checkpoints", "compare", "config", "evaluation", "monitoring")]
"""Pages on what to do with a run."""
PAGES = sorted([EXTENDING, DOCS / "agents.md", *(DOCS / "tutorials").glob("*.md"), *OF_A_RUN])
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*) -->\n)?"
    r"(?:```(?P<kind>python|yaml|bash)\n(?P<fenced>.*?)^```$|(?P<indented>^    \S[^\n]*\n(?:^    [^\n]+\n)*))",
    re.MULTILINE | re.DOTALL,
)
SHOWN = ("    ╭", "    [", "    ```")
"""How the output of a command or a model begins, which a reader does not type."""
OF_OTHERS = {"coming_from.md", "status.md"}
"""Pages with configuration keys of other trainers, or of what is not there."""
FILES = (".py", ".json", ".jsonl", ".log", ".parquet")


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


def typed(page: Path) -> list[tuple[str, str, str]]:
    """(what the comment says, kind, text) of each block that a reader types or saves."""
    text = page.read_text(encoding="utf-8").replace("```\n```yaml", "```\n<!-- with the one above -->\n```yaml")
    found = (match.group("mark", "kind", "fenced", "indented") for match in BLOCK.finditer(text))
    given = [(mark or "", kind or "bash", fenced or indented) for mark, kind, fenced, indented in found]
    return [block for block in given if not block[2].startswith(SHOWN)]


def commands(text: str) -> list[str]:
    """The lines of a block, without variables before them, what stands behind them, and the file of their output."""
    lines = (line.split("  #")[0].strip() for line in text.replace("\\\n", " ").splitlines())
    return [re.sub(r"^(?:[A-Z_]+=\S+ )+| > \S+$", "", line) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    for mark, kind, text in typed(page):
        what, _, rest = mark.partition(": ")
        if what == "example":
            code, _ = blocks(page, rest)
            assert len(code.splitlines()) <= MOST_LINES + 1
            taken = re.compile(rf'\b(?:saved_)?example\("{re.escape(rest)}"')
            assert any(taken.search(test.read_text()) for test in (ROOT / "tests").rglob("test_*.py")), rest
        elif what in ("tested", "not run"):
            named = re.findall(r"tests/[\w/]+(?:\.py)?", rest)
            assert rest and all((ROOT / file).exists() for file in named) and (named or what == "not run"), mark
        else:
            assert (what == "dry run" and rest) or mark in ("run", "with the one above"), f"{name(page)}: {text}"
        assert what not in ("run", "dry run") or kind == "bash", name(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_of_ctpo_is_one(page: Path) -> None:
    """Verbs, options and the spelling of overrides."""
    for _, kind, text in typed(page):
        for line in commands(text) if kind == "bash" else ():
            if line.startswith("ctpo "):
                words = shlex.split(line)[1:]
                given = parse(words)
                for word in getattr(given, "overrides", ()):
                    assert "=" not in word or check_override(word) is None, line


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_configuration_is_one(page: Path, tmp_path: Path) -> None:
    """Keys and kinds of values of what a reader saves as YAML, over the quickstart's configuration."""
    for _, kind, text in typed(page):
        if kind == "yaml":
            (tmp_path / "own.yaml").write_text(f"defaults: {ROOT / 'configs' / 'quickstart.yaml'}\n{text}")
            load_config(tmp_path / "own.yaml")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has finished, with the model that the quickstart starts from."""
    return write_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def checkout(tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what is shipped, the quickstart's run, and the reader's configuration."""
    shutil.copytree(finished, tmp_path / "runs" / "quickstart")
    for shipped in ("configs", "examples"):
        (tmp_path / shipped).symlink_to(ROOT / shipped)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "toolmath").symlink_to(task_folder(*SMALL_TASK))
    for run in ("quickstart", "sft"):
        shutil.copytree(task_folder(*SMALL_TASK) / "model", tmp_path / "runs" / run / "sft_model")
    (tmp_path / "mine.yaml").write_text("defaults: configs/quickstart.yaml\nrun: {name: mine}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def expanded(word: str, finished: Path) -> list[str]:
    """A word as a shell gives it; a run that the reader has by now is made, and two for a pattern of runs."""
    if word.startswith("runs/"):
        for run in dict.fromkeys(word.replace("*", number) for number in "01"):
            shutil.copytree(finished, run, dirs_exist_ok=True)
    return sorted(glob.glob(word)) or [word]


def to_run(page: Path) -> list[list[str]]:
    """The commands of a page that are run here, as words."""
    found = []
    for mark, _, text in typed(page):
        lines = [shlex.split(line) for line in commands(text)]
        if mark == "run":
            found += [words for words in lines if words != ["source", ".venv/bin/activate"]]
        elif mark.startswith("dry run"):
            ours = (words for words in lines if words[0] == "ctpo")
            found += [words if "--dry-run" in words else [*words, "--dry-run"] for words in ours]
    return found


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=pytest.mark.slow if page.stem == "compare" else ())
        for page in filter(to_run, PAGES)
    ],
)
def test_the_commands_that_need_no_more_are_run(
    page: Path, checkout: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for program, *words in to_run(page):
        words = [found for word in words for found in expanded(word, finished)]
        if program == "python":
            subprocess.run([sys.executable, *words], check=True, timeout=scaled(60))
        else:
            assert program == "ctpo" and main(words) == 0, capsys.readouterr().err


def test_every_key_that_a_page_names_is_one() -> None:
    """Keys in a sentence or a table, such as `policy.offload: all`. The blocks of examples have tests of their own."""
    rows = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8").splitlines()
    keys = {row.split("`")[1] for row in rows if row.startswith("| `")}
    assert {"run.name", "policy.offload"} <= keys
    groups = {key.rpartition(".")[0] for key in keys} | {"rollout.tool_parser.name"}
    sections = {key.partition(".")[0] for key in keys}
    for page in {*PAGES, *DOCS.glob("*.md"), ROOT / "README.md"}:
        if page.name not in OF_OTHERS:
            named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", page.read_text(encoding="utf-8"))
            wrong = {key for key in named if key.partition(".")[0] in sections} - keys - groups
            assert [key for key in wrong if not key.endswith(FILES)] == [], page
