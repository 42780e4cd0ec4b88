"""The table of all keys, from the schema; `make reference` writes docs/reference/configuration.md with it."""

from __future__ import annotations

from ctpo_megatron.config.keys import Key, known_keys
from ctpo_megatron.config.problems import show


def reference() -> str:
    """The markdown tables of all keys, one per top-level section."""
    lines: list[str] = []
    section = ""
    for key in known_keys():
        top = key.path.split(".")[0]
        if top != section:
            section = top
            lines += ["", f"## {top}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines.append(f"| `{key.path}` | {_cell(key.type)} | {_default(key)} | {_cell(key.meaning)} |")
    return "\n".join(lines).strip() + "\n"


def _default(key: Key) -> str:
    if key.required:
        return "**required**"
    value = list(key.default) if isinstance(key.default, tuple) else key.default
    return f"`{show(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
