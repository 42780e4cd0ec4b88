"""NoVerdict: stands for the reward that a trajectory could not be given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MissingCause = Literal["timeout", "exception", "crash", "none", "not_finite"]
"""Why there is no verdict: the reward function took too long, raised, its process died, or it returned None or a figure
that is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """Stands for the reward of a trajectory that was not judged. reason: one line for people."""

    cause: MissingCause
    reason: str


class Unreachable(NoVerdict):
    """An exception of a connection: what the reward function asks may be up at the next call."""
