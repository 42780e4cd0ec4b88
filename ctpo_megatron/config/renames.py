"""Keys that had another name in an earlier version: a configuration that still uses one is told the new name."""

from __future__ import annotations

from collections.abc import Mapping

RENAMED_KEYS: Mapping[str, str] = {
    "observe": "tracking",
    "warmup": "sft",
    "sft.traces_per_step": "sft.conversations_per_step",
    "prepare.warmup_traces": "prepare.sft_conversations",
    "prepare.tokenizer_traces": "prepare.tokenizer_conversations",
}
"""Dotted path of version 0.1 -> the path now. A renamed section stands for all keys below it."""
REMOVED_KEYS: Mapping[str, str] = {
    "tracking.tensorboard": "tensorboard is on by default; tracking.trackers lists it or leaves it out, as in []",
}
"""Dotted path that is gone without a successor of the same form -> what to do instead."""


def renamed(key: str) -> str | None:
    """The present name of a key of an earlier version, or None for a key that never was one."""
    return RENAMED_KEYS.get(key)
