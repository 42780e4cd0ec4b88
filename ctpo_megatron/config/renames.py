"""Keys and values renamed since an earlier version, for error messages with the new name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RENAMED_KEYS: Mapping[str, str] = {
    "observe": "tracking",
    "warmup": "sft",
    "sft.traces_per_step": "sft.conversations_per_step",
    "reward.kind": "reward.function",
    "prepare.warmup_traces": "prepare.sft_conversations",
    "prepare.tokenizer_traces": "prepare.tokenizer_conversations",
    "objective.ratio": "objective.ratio_mode",
    "objective.clip": "objective.clip_mode",
    "objective.clip_dual": "objective.clip_c",
    "objective.aggregation": "objective.loss_agg_mode",
    "objective.token_normalizer": "objective.loss_scale_factor",
}
"""Dotted path in version 0.1 -> present path. A renamed section covers all keys below it."""
REMOVED_KEYS: Mapping[str, str] = {
    "tracking.tensorboard": "tensorboard is on by default; tracking.trackers lists it or leaves it out, as in []",
}
"""Dotted path that was removed without an equivalent -> what to do instead."""

RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "objective.ratio_mode": {"cumulative": "cumprod", "sequence_geomean": "sequence-geomean"},
    "objective.loss_agg_mode": {
        "sequence_mean": "seq-mean-token-mean",
        "token_mean": "token-mean",
        "sequence_sum": "seq-mean-token-sum",
    },
}
"""Present dotted path -> value in version 0.1 -> present value."""


_KL = re.compile(r"(^|_)kl(_|$)|^(ref|reference)_(model|policy)$")


def is_kl(key: str, value: Any = None) -> bool:
    """Whether an unknown key, or a key below it, would set a KL penalty."""
    inner = isinstance(value, Mapping) and any(is_kl(str(name), below) for name, below in value.items())
    return inner or key == "objective.beta" or _KL.search(key.rpartition(".")[2]) is not None


def renamed(key: str) -> str | None:
    """The present name of a key of an earlier version, or None for an unknown key."""
    return RENAMED_KEYS.get(key)


def renamed_value(key: str, value: Any) -> str | None:
    """The present name of a value of a key (given its present name), or None if it was never renamed."""
    return RENAMED_VALUES.get(key, {}).get(value) if isinstance(value, str) else None
