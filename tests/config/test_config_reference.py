"""The table of keys has what the schema says. tests/test_site.py compares it with docs/reference/configuration.md."""

from __future__ import annotations

from ctpo_megatron.config.keys import known_keys
from docs.site.reference import keys


def test_reference_has_every_key_once() -> None:
    text = keys()
    assert [key.path for key in known_keys() if text.count(f"| `{key.path}` |") != 1] == []


def test_types_and_defaults_in_words() -> None:
    lines = {line.split("|")[1].strip(): line for line in keys().splitlines() if line.startswith("| `")}
    assert "| text | **required** |" in lines["`run.name`"]
    assert "| 2 numbers | `[0.9, 0.999]` |" in lines["`policy.optimizer.betas`"]
    assert "| integer > 0 or null | `null` |" in lines["`rollout.max_turn_tokens`"]
    assert '| "proximal" \\| "behaviour" \\| "decoupled" | `"proximal"` |' in lines["`objective.anchor`"]
    assert "| `0.003` |" in lines["`sft.optimizer.lr`"]  # the default of its place, not of its class
    assert "| number > 0, <= 1 | `1.0` |" in lines["`rollout.top_p`"]
