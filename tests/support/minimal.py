"""The smallest configuration."""

from __future__ import annotations

from typing import Any

from ctpo_megatron.config import Config


def minimal(**sections: dict[str, Any]) -> Config:
    """Return a valid configuration with these keys of its sections, of files that need not be there."""
    least = {"run": {"name": "x", "steps": 1}, "model": {"path": "model"}, "data": {"train": ["train.jsonl"]}}
    return Config.model_validate(sections | {name: keys | sections.get(name, {}) for name, keys in least.items()})
