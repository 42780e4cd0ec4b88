"""Prose lint of documents and product code: python -m tests.prose.

Phrases of phrases.toml are found in documents, comments, docstrings and messages, and named with their replacement.
Sentences of documents and docstrings have at most 30 words. Docstrings of public functions begin with a verb.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.test_links import text_of

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PRODUCT = (
    "ctpo_megatron",
    "answers/ctpo_answers",
    "kernels/ctpo_kernels",
    "sandbox/ctpo_sandbox",
    "launchers/ctpo_launchers",
    "docs/notebooks",
)
DOCUMENTS = (
    "*.md",
    "docs/**/*.md",
    "docs/**/*.ipynb",
    "benchmarks/README.md",
    "examples/README.md",
    "answers/README.md",
    "kernels/README.md",
)
LIMIT = 30
"""Words of a sentence."""

FENCE = re.compile(r"^([ ]*)(```|~~~|\$\$).*?^[ ]*\2[ ]*$|^<!-- [^\n]* -->$", re.MULTILINE | re.DOTALL)
"""Blocks without prose: code, formulas, comments."""
CODE = re.compile(r"``[^`]+``|`[^`]+`|\$[^$\n]+\$")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+|^\s*>\s?|^#{1,6}\s+")
ALONE = re.compile(r"^\s*(?:\||#{1,6}\s)")
"""Rows of tables and headings."""
PARAMETER = re.compile(r"^\w+(?:, \w+)*: ")
END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?])[\"')_]*\s+(?=[\"'(_]*[A-Z0-9]|code\b|\w+(?:, \w+)*: )")
"""Between two sentences. The second may begin with the name of a parameter and a colon."""
WORD = re.compile(r"\w[\w'.,/+-]*")
NO_VERBS = {"The", "A", "An", "Whether", "Why", "What", "How", "All", "Every", "Each", "One", "Where"}
"""Words that no docstring of a public function begins with. Nouns are not known here."""


@dataclass(frozen=True)
class Text:
    """A run of prose. line: where it begins. bounded: the length of its sentences is."""

    path: str
    line: int
    words: str
    bounded: bool


def texts(root: Path) -> Iterator[Text]:
    """All prose below a root: documents first, then product code."""
    for pattern in DOCUMENTS:
        for path in sorted(root.glob(pattern)):
            yield from of_markdown(str(path.relative_to(root)), text_of(path))
    for folder in PRODUCT:
        for path in sorted((root / folder).rglob("*.py")):
            yield from of_python(str(path.relative_to(root)), path.read_text(encoding="utf-8"))


def of_markdown(path: str, text: str) -> Iterator[Text]:
    """Paragraphs, list items, headings and table cells, without code."""
    text = FENCE.sub(lambda match: "\n" * match.group().count("\n"), text)
    for line, paragraph in _paragraphs(text):
        cells = re.split(r"(?<!\\)\|", paragraph) if paragraph.lstrip().startswith("|") else [paragraph]
        yield from (Text(path, line, plain(cell), bounded=True) for cell in cells)


def of_python(path: str, text: str) -> Iterator[Text]:
    """Docstrings, those of attributes included, then messages, then comments."""
    tree = ast.parse(text)
    strings = {id(node.value): node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) in strings:
            indent = "\n" + " " * node.col_offset
            for line, paragraph in _paragraphs(node.value.replace(indent, "\n")):
                yield Text(path, node.lineno + line - 1, plain(paragraph), bounded=True)
        elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and id(node) not in inside):
            yield Text(path, node.lineno, plain(_literal(node)), bounded=False)
    yield from _comments(path, text)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Line and text. An indented block after a blank line is code; headings and rows of tables stand alone."""
    lines: list[str] = []
    after_blank, code, alone = True, False, False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        item = ITEM.match(line)
        code = line.startswith("    ") and bool(line.strip()) and (after_blank or code) and not item
        if lines and (alone or code or item or not line.strip() or ALONE.match(line) or PARAMETER.match(line)):
            yield number - len(lines), "\n".join(lines)
            lines = []
        if line.strip() and not code:
            lines.append(ITEM.sub("", line))
        alone = ALONE.match(line) is not None
        after_blank = alone or not line.strip()


def _literal(node: ast.expr) -> str:
    """A string, or an f-string with a word in each place."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _comments(path: str, text: str) -> Iterator[Text]:
    """Comments; lines that follow each other are one text."""
    block: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield Text(path, last - len(block) + 1, plain("\n".join(block)), bounded=False)
                block = []
            block.append(token.string.lstrip("#:! "))
            last = token.start[0]
    if block:
        yield Text(path, last - len(block) + 1, plain("\n".join(block)), bounded=False)


def plain(text: str) -> str:
    """Without markup; a piece of code or a formula is one word."""
    return LINK.sub(r"\1", CODE.sub("code", text)).replace("*", "")


def sentences(text: str) -> list[str]:
    """The sentences of a text, on one line each."""
    return [" ".join(sentence.split()) for sentence in END.split(text) if sentence.strip()]


def count(sentence: str) -> int:
    """Words of a sentence."""
    return len(WORD.findall(sentence))


def phrases() -> dict[str, str]:
    """Phrase -> what to write instead."""
    return tomllib.loads((HERE / "phrases.toml").read_text(encoding="utf-8"))


def long_sentences(found: Iterable[Text]) -> Iterator[tuple[Text, str]]:
    """Every sentence of more than `LIMIT` words, where their length is bounded."""
    bounded = (text for text in found if text.bounded)
    return ((text, each) for text in bounded for each in sentences(text.words) if count(each) > LIMIT)


def occurrences(found: Iterable[Text], banned: Mapping[str, str]) -> Iterator[tuple[Text, str]]:
    """Every place of a phrase, in whatever case and broken over lines."""
    choices = "|".join(re.escape(phrase).replace("\\ ", r"\s+") for phrase in sorted(banned, key=len, reverse=True))
    pattern = re.compile(rf"\b({choices})\b", re.IGNORECASE)
    for text in found:
        for match in pattern.finditer(text.words):
            line = text.line + text.words.count("\n", 0, match.start())
            yield Text(text.path, line, text.words, text.bounded), " ".join(match.group().lower().split())


def without_verb(path: str, text: str) -> Iterator[str]:
    """Yield a line for each public function whose docstring begins with a word of `NO_VERBS`. Properties are nouns."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        first = (ast.get_docstring(node) or "").partition(" ")[0]
        if first in NO_VERBS and not any("property" in ast.unparse(each) for each in node.decorator_list):
            yield f"{path}:{node.lineno}: the docstring of {node.name} begins with {first!r}: begin with a verb"


def problems(root: Path) -> list[str]:
    """What is wrong below a root, one line each."""
    found, banned = list(texts(root)), phrases()
    return [
        *(
            f"{text.path}:{text.line}: {phrase!r}: write {banned[phrase]!r}"
            for text, phrase in occurrences(found, banned)
        ),
        *(
            f"{text.path}:{text.line}: {count(each)} words, at most {LIMIT}: {each}"
            for text, each in long_sentences(found)
        ),
        *(
            line
            for folder in PRODUCT
            for file in sorted((root / folder).rglob("*.py"))
            for line in without_verb(str(file.relative_to(root)), file.read_text(encoding="utf-8"))
        ),
    ]


if __name__ == "__main__":
    if found := problems(ROOT):
        sys.exit("\n".join(found))
