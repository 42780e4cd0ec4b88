"""The prose lint: a planted phrase is found with its replacement, a sentence of 31 words too; `--update` never adds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose.__main__ import Baseline, count, main, of_markdown, of_python, phrases, sentences, texts

LONG = " ".join(["Word", *["word"] * 30]) + "."
SHORT = " ".join(["Word", *["word"] * 29]) + "."


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one document, one module and an empty baseline."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(f"# Page\n\n{SHORT} Short sentences follow.\n")
    (tmp_path / "ctpo_megatron").mkdir()
    (tmp_path / "ctpo_megatron" / "part.py").write_text('"""A module."""\n')
    Baseline().write(tmp_path / "baseline.json")
    return tmp_path


def run(tree: Path, *arguments: str) -> int:
    return main(arguments, tree, tree / "baseline.json")


def baseline(tree: Path) -> Baseline:
    return Baseline.read(tree / "baseline.json")


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("docs/page.md", "One.\n\nIt must go\non for ever.\n", 3),
        ("README.md", "| a | must Go on |\n", 1),
        ("CONTRIBUTING.md", "- steps **go on** here\n", 1),
        ("ctpo_megatron/part.py", "x = 1\n# Both threads\n# go on.\n", 3),
        ("ctpo_megatron/part.py", 'def f() -> None:\n    """Sum.\n\n    Both go on.\n    """\n', 4),
        ("ctpo_megatron/part.py", 'x = f"{1} steps go on"\n', 1),
        ("kernels/ctpo_kernels/part.py", 'raise ValueError("it cannot go on")\n', 1),
    ],
)
def test_a_phrase_is_found_with_its_replacement(
    tree: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, line: int
) -> None:
    (tree / file).parent.mkdir(parents=True, exist_ok=True)
    (tree / file).write_text(text)
    assert run(tree) == 1
    found = capsys.readouterr().out.splitlines()
    assert found == [f"{file}:{line}: 'go on': write 'continue' (in all 1 times, 0 in the baseline)"]


def test_code_is_no_prose(tree: Path) -> None:
    text = "`go on` and\n\n```\ngo on\n```\n\n    go on\n\n## Code\n    go on\n"
    (tree / "docs" / "page.md").write_text(text)
    (tree / "ctpo_megatron" / "part.py").write_text("go_on = 1\nwhile go_on: pass\n")
    assert run(tree) == 0


def test_a_long_sentence_is_found(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 31 words; one of 30 stands in the page already."""
    (tree / "docs" / "page.md").write_text(f"{SHORT}\n\n- First.\n- {LONG}\n")
    (tree / "ctpo_megatron" / "part.py").write_text(f'x = 1\n"""{LONG}"""\n# {LONG}\n')
    assert run(tree) == 1
    found = capsys.readouterr().out.splitlines()
    assert [line.split(" words")[0] for line in found] == ["docs/page.md:4: 31", "ctpo_megatron/part.py:2: 31"]


def test_sentences() -> None:
    text = "Of `a.b` (see [there](x.md)). It has 2 parts, e.g. This one. n: int64. `code` ends it."
    (only,) = of_markdown("page.md", text)
    assert sentences(only.words) == [
        "Of code (see there).",
        "It has 2 parts, e.g. This one.",
        "n: int64.",
        "code ends it.",
    ]
    assert [count(each) for each in sentences(only.words)] == [4, 7, 2, 3]


def test_parameters_and_items_stand_alone() -> None:
    docstring = '"""One.\n\nx, y: [N], two\nlines\nz: three\n"""\n'
    assert [text.words for text in of_python("a.py", docstring)] == ["One.", "x, y: [N], two\nlines", "z: three"]
    assert [text.words for text in of_markdown("a.md", "# Head\nText\n1. one\n2. two\n")] == [
        "Head",
        "Text",
        "one",
        "two",
    ]


def test_what_was_there_may_stay_and_move(tree: Path) -> None:
    page = tree / "docs" / "page.md"
    page.write_text(f"Steps go on.\n\n{LONG}\n")
    Baseline({"go on": 1}, {"of nothing": "gone"}).write(tree / "baseline.json")
    assert run(tree) == 1  # the sentence is new
    key = next(iter(_digests(tree)))
    Baseline({"go on": 1}, {key: "Word word"}).write(tree / "baseline.json")
    assert run(tree) == 0
    page.rename(tree / "docs" / "moved.md")
    assert run(tree) == 0
    (tree / "docs" / "moved.md").write_text(f"Steps go on and go on.\n\n{LONG.replace(' ', chr(10), 4)}\n")
    assert run(tree) == 1  # twice now


def test_an_entry_that_is_not_needed_fails_until_updated(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "docs" / "page.md").write_text("Steps go on.\n")
    Baseline({"go on": 3, "anew": 1}, {"0123456789ab": "A sentence that was"}).write(tree / "baseline.json")
    assert run(tree) == 1
    assert "python -m tests.prose --update" in capsys.readouterr().out
    assert run(tree, "--update") == 0
    assert baseline(tree) == Baseline({"go on": 1}, {})


def test_update_never_adds(tree: Path) -> None:
    (tree / "docs" / "page.md").write_text(f"Steps go on and go on, anew.\n\n{LONG}\n")
    before = Baseline({"go on": 1}, {})
    before.write(tree / "baseline.json")
    assert run(tree, "--update") == 1
    assert baseline(tree) == before


def test_phrases_are_several_words_or_rare_ones() -> None:
    """A common word by itself is no mistake."""
    single = {phrase for phrase in phrases() if " " not in phrase}
    assert single == {"anew", "beside", "nobody", "somebody", "whoever"}
    assert all(phrase == phrase.lower() and better for phrase, better in phrases().items())


def _digests(tree: Path) -> set[str]:
    from tests.prose.__main__ import digest, long_sentences

    return {digest(sentence) for _, sentence in long_sentences(texts(tree))}
