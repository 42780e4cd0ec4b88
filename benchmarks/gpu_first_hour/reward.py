"""A reward for random answers: it differs within groups, so that there is a gradient."""

from __future__ import annotations

from typing import Any


def even(trajectory: Any, prompt: Any) -> float:
    """Return 1 for an even last token, else 0."""
    return 1.0 - trajectory.token_ids[-1] % 2
