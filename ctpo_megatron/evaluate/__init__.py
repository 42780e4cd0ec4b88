"""`ctpo eval`: held-out prompts answered and scored without a trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctpo_megatron.evaluate.target import Target, find_target, read_config

if TYPE_CHECKING:
    from ctpo_megatron.evaluate.command import Outcome, evaluate

__all__ = ["Outcome", "Target", "evaluate", "find_target", "read_config"]


def __getattr__(name: str) -> Any:
    """Import lazily, since these modules start engines."""
    if name not in ("Outcome", "evaluate"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.command"), name)
