"""The key table of docs/config.md is what the schema says."""

from __future__ import annotations

from pathlib import Path

from ctpo_megatron.config.keys import known_keys
from ctpo_megatron.config.reference import reference, update

DOCS = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def test_docs_are_up_to_date() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert update(text) == text, "run: python -m ctpo_megatron.config.reference docs/config.md"


def test_reference_has_every_key_once() -> None:
    text = reference()
    assert [key.path for key in known_keys() if text.count(f"| `{key.path}` |") != 1] == []


def test_types_and_defaults_in_words() -> None:
    lines = {line.split("|")[1].strip(): line for line in reference().splitlines() if line.startswith("| `")}
    assert "| text | **required** |" in lines["`run.name`"]
    assert "| 2 numbers | `[0.9, 0.999]` |" in lines["`policy.optimizer.betas`"]
    assert "| integer > 0 or null | `null` |" in lines["`rollout.max_turn_tokens`"]
    assert '| "proximal" \\| "behaviour" \\| "decoupled" | `"proximal"` |' in lines["`objective.anchor`"]
    assert "| `0.003` |" in lines["`sft.optimizer.lr`"]  # the default of its place, not of its class
    assert "| number > 0, <= 1 | `1.0` |" in lines["`rollout.top_p`"]
