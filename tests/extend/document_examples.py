"""Takes the examples out of the documents, so that tests run what the documents say."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXTENDING = DOCS / "extending.md"
MOST_LINES = 25


def blocks(document: Path, name: str) -> tuple[str, str]:
    """The Python block after `<!-- example: NAME -->` and the YAML block after it.

    Raises LookupError when the document has no such example.
    """
    pattern = rf"<!-- example: {re.escape(name)} -->\n```python\n(.*?)```\n```yaml\n(.*?)```"
    found = re.search(pattern, document.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise LookupError(f"{document} has no example {name!r} with a python and a yaml block")
    return found[1], found[2]


def example(name: str, folder: Path, document: Path) -> tuple[Path, str]:
    """Writes the Python of an example to the file in `folder` that its first line names.

    Returns the file, and the YAML.
    """
    code, settings = blocks(document, name)
    first, _, code = code.partition("\n")
    if (lines := len(code.splitlines())) > MOST_LINES:
        raise ValueError(f"{document}: example {name!r} has {lines} lines, at most {MOST_LINES} are promised")
    file = folder / first.removeprefix("# ")
    file.write_text(code, encoding="utf-8")
    return file, settings
