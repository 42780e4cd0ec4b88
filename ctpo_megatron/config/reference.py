"""Writes the key table of docs/config.md from the schema: `python -m ctpo_megatron.config.reference [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from ctpo_megatron.config.keys import Key, known_keys
from ctpo_megatron.config.problems import show

BEGIN = "<!-- keys: begin (written by `python -m ctpo_megatron.config.reference docs/config.md`) -->"
END = "<!-- keys: end -->"


def reference() -> str:
    """The markdown tables of all keys, one per top-level section."""
    lines: list[str] = []
    section = ""
    for key in known_keys():
        top = key.path.split(".")[0]
        if top != section:
            section = top
            lines += ["", f"### {top}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines.append(f"| `{key.path}` | {_cell(key.type)} | {_default(key)} | {_cell(key.meaning)} |")
    return "\n".join(lines).strip() + "\n"


def update(text: str) -> str:
    """A document with its key table replaced by the current one."""
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n{reference()}{END}{tail}"


def _default(key: Key) -> str:
    if key.required:
        return "**required**"
    value = list(key.default) if isinstance(key.default, tuple) else key.default
    return f"`{show(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Print the tables, or rewrite them in place in the file named."""
    if len(sys.argv) == 1:
        print(reference(), end="")
    else:
        file = Path(sys.argv[1])
        file.write_text(update(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
