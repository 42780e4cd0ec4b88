"""The table of keys has what the schema says. tests/test_site.py compares it with docs/reference/configuration.md."""

from __future__ import annotations

from ctpo_megatron.config.keys import known_keys
from docs.site.reference import keys


def test_reference_has_every_key_once() -> None:
    text = keys()
    assert [key.path for key in known_keys() if text.count(f"| `{key.path}` |") != 1] == []
