"""The prose lint finds planted phrases with their replacement, long sentences, and docstrings without a verb."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.prose.__main__ import ROOT, phrases, problems

LONG = " ".join(["Word", *["word"] * 30]) + "."
SHORT = " ".join(["Word", *["word"] * 29]) + "."


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one document and one module."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(f"# Page\n\n{SHORT} Short sentences follow.\n")
    (tmp_path / "ctpo_megatron").mkdir()
    (tmp_path / "ctpo_megatron" / "part.py").write_text('"""A module."""\n')
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("docs/page.md", "One.\n\nIt must go\non for ever.\n", 3),
        ("README.md", "| a | must Go on |\n", 1),
        ("CONTRIBUTING.md", "- steps **go on** here\n", 1),
        ("SECURITY.md", "Steps go on.\n", 1),
        ("kernels/README.md", "Steps go on.\n", 1),
        ("benchmarks/README.md", "Steps go on.\n", 1),
        ("examples/README.md", "Steps go on.\n", 1),
        ("ctpo_megatron/part.py", "x = 1\n# Both threads\n# go on.\n", 3),
        ("ctpo_megatron/part.py", 'def f() -> None:\n    """Sum.\n\n    Both go on.\n    """\n', 4),
        ("ctpo_megatron/part.py", 'x = f"{1} steps go on"\n', 1),
        ("kernels/ctpo_kernels/part.py", 'raise ValueError("it cannot go on")\n', 1),
    ],
)
def test_a_phrase_is_found_with_its_replacement(tree: Path, file: str, text: str, line: int) -> None:
    (tree / file).parent.mkdir(parents=True, exist_ok=True)
    (tree / file).write_text(text)
    assert problems(tree) == [f"{file}:{line}: 'go on': write 'continue'"]


def test_code_is_no_prose(tree: Path) -> None:
    text = "`go on` and\n\n```\ngo on\n```\n\n    go on\n\n## Code\n    go on\n"
    (tree / "docs" / "page.md").write_text(text)
    (tree / "ctpo_megatron" / "part.py").write_text("go_on = 1\nwhile go_on: pass\n")
    assert problems(tree) == []


def test_a_long_sentence_is_found(tree: Path) -> None:
    """Of 31 words; one of 30 stands in the page already."""
    (tree / "docs" / "page.md").write_text(f"{SHORT}\n\n- First.\n- {LONG}\n")
    (tree / "ctpo_megatron" / "part.py").write_text(f'x = 1\n"""{LONG}"""\n# {LONG}\n')
    assert [line.split(" words")[0] for line in problems(tree)] == ["docs/page.md:4: 31", "ctpo_megatron/part.py:2: 31"]


def test_a_docstring_without_a_verb_is_found(tree: Path) -> None:
    """Of public functions: a property is a noun, and an underscore hides a function."""
    text = """
        class Rows:
            def first(self):
                "The first row."

            @property
            def last(self):
                "The last row."

            async def send(self):
                "Return the rows."

            def _all(self):
                "All rows."
        """
    (tree / "ctpo_megatron" / "part.py").write_text(textwrap.dedent(text))
    assert problems(tree) == ["ctpo_megatron/part.py:3: the docstring of first begins with 'The': begin with a verb"]


@pytest.mark.slow  # `make lint` looks at them too
def test_ours_has_neither() -> None:
    assert problems(ROOT) == []


def test_phrases_are_several_words_or_rare_ones() -> None:
    """A common word by itself is no mistake."""
    single = {phrase for phrase in phrases() if " " not in phrase}
    assert single == {"anew", "mended", "beside", "nobody", "somebody", "whoever"}
    assert all(phrase == phrase.lower() and better for phrase, better in phrases().items())
