"""Keys and values that are refused with a reason of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_REPLACEMENTS: Mapping[tuple[str, str], str] = {("rollout.weights.transport", "nccl_m2n"): "nccl or auto"}
"""Dotted path and a value that it no longer has -> what to give instead."""

_KL = re.compile(r"(^|_)kl(_|$)|^(ref|reference)_(model|policy)$")


def is_kl(key: str, value: Any = None) -> bool:
    """Whether an unknown key, or one below it, would set a penalty on the divergence from a reference model."""
    inner = isinstance(value, Mapping) and any(is_kl(str(name), below) for name, below in value.items())
    return inner or key == "objective.beta" or _KL.search(key.rpartition(".")[2]) is not None


def replacement(key: str, value: Any) -> str | None:
    """What to give instead of a value that was removed; None for a value that a key never had."""
    return _REPLACEMENTS.get((key, value)) if isinstance(value, str) else None
