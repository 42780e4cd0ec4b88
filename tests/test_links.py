"""Links of README and docs: the files and headings they name exist. Also a command: `python tests/test_links.py`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
FORMS = ("md", "ipynb")
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def documents(root: Path) -> list[Path]:
    """Every Markdown file and notebook of the repository that a reader opens."""
    folders = ("docs/**", "benchmarks/**", "examples", "answers", "kernels")
    patterns = ("*.md", *(f"{folder}/*.{form}" for folder in folders for form in FORMS))
    return sorted({path for pattern in patterns for path in root.glob(pattern)})


def text_of(path: Path) -> str:
    """A document; of a notebook its Markdown cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Fragments of a document; the second heading of a name ends in -1, the third in -2."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        base = anchor(heading)
        names = (base if count == 0 else f"{base}-{count}" for count in range(len(found) + 1))
        found.add(next(name for name in names if name not in found))
    return found


def broken_links(path: Path) -> Iterator[str]:
    """What is wrong with the links of a document, one line each. Addresses on the network are not opened."""
    text = CODE.sub(_blank, FENCE.sub(_blank, text_of(path)))
    for match in LINK.finditer(text):
        link = match.group(1)
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        file, _, fragment = link.partition("#")
        target = (path.parent / unquote(file)).resolve() if file else path
        line = text.count("\n", 0, match.start()) + 1
        where = f"{path}:{line}: {link}:"
        if not target.exists():
            yield f"{where} no such file"
        elif fragment and target.suffix[1:] in FORMS and fragment not in anchors(text_of(target)):
            yield f"{where} no such heading in {target.name}"


def _blank(match: re.Match[str]) -> str:
    """Nothing but the line breaks, so that line numbers stay."""
    return "\n" * match.group().count("\n")


def test_links_of_the_documents() -> None:
    assert [line for path in documents(ROOT) for line in broken_links(path)] == []


def test_broken_links_are_named(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `b` & c\n# Twice\n# Twice\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[good](other.md#a-b--c) [second](other.md#twice-1) [here](#page) ![picture](https://example.org/x.png)\n"
        "# Page\n`[code](nowhere.md)`\n```\n[code](nowhere.md)\n```\n[gone](gone.md)\n[wrong](other.md#no-heading)\n"
    )
    assert list(broken_links(page)) == [
        f"{page}:7: gone.md: no such file",
        f"{page}:8: other.md#no-heading: no such heading in other.md",
    ]


if __name__ == "__main__":
    broken = [line for path in documents(ROOT) for line in broken_links(path)]
    print(*(broken or [f"{len(documents(ROOT))} documents: no broken link"]), sep="\n")
    sys.exit(1 if broken else 0)
