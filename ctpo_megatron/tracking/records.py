"""What readers of dumps get, and how writers let other threads work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TRACES = ("log_ratio", "clip_low", "clip_high", "prefix_log_ratio")
"""Numbers of each token that a pass of the update gives, the last where the objective's ratio is not cumulative."""
Record = dict[str, Any]
"""A trajectory as a dump has it, in Python's numbers, lists and texts."""
Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens kept (`lambda ids: tokenizer.decode(ids, skip_special_tokens=False)`)."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a reader chooses trajectories by.

    place: in the dump. answer: the ground truth of the prompt. reward: None without a verdict. tools: the statuses of
    its calls, each once, in order of the alphabet. traced: it has `log_ratio`.
    """

    place: int
    prompt_id: str
    data_source: str
    answer: str
    sample_index: int
    reward: float | None
    finish_reason: str
    tools: tuple[str, ...]
    traced: bool


AT_ONCE = 4_096
"""Tokens of work that hold the lock for about a millisecond."""
_PAUSE_S = 5e-5
"""Long enough that a thread which waits is woken and takes the lock."""


class YieldGil:
    """Counts work in tokens, and pauses after each `AT_ONCE`. The interpreter alone would switch every 5 ms."""

    def __init__(self) -> None:
        self._held = 0

    def after(self, tokens: int) -> None:
        """So much was done."""
        self._held += tokens
        if self._held >= AT_ONCE:
            self._held = 0
            time.sleep(_PAUSE_S)
