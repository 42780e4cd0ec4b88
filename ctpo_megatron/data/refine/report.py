"""The outcome of every problem of a collection: a table of counts, and a JSON list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Reason = Literal["unreadable", "unverifiable", "conflict", "duplicate", "near duplicate", "contaminated", "overlong"]
MEANING: dict[Reason, str] = {
    "unreadable": "no text or no answer",
    "unverifiable": "math_verify gives every answer 0",
    "conflict": "the same text with another answer: which is right cannot be told",
    "duplicate": "the same text as an earlier one",
    "near duplicate": "nearly the text of an earlier one, same numbers, same answer",
    "contaminated": "shares its text with an evaluation file",
    "overlong": "more tokens than --max-tokens",
}


@dataclass(frozen=True, slots=True)
class Dropped:
    """A dropped problem, with the problem it was compared to."""

    file: str
    row: int
    id: str
    reason: Reason
    detail: str


def report_json(
    settings: Mapping[str, Any], read: Mapping[str, int], kept: int, dropped: Sequence[Dropped], phrases: Sequence[str]
) -> dict[str, Any]:
    """The report as JSON: settings, counts, and every dropped row."""
    counts = Counter(each.reason for each in dropped)
    return {
        "settings": dict(settings),
        "read": dict(read),
        "kept": kept,
        "dropped": {reason: counts[reason] for reason in MEANING},
        "common_phrases": list(phrases),
        "rows": [asdict(each) for each in dropped],
    }


def report_rows(read: int, kept: int, dropped: Sequence[Dropped]) -> list[tuple[str, str, str]]:
    """The report as rows of a table: reason, count, examples."""
    rows = [("read", f"{read:,}", "")]
    for reason, meaning in MEANING.items():
        ids = [each.id for each in dropped if each.reason == reason]
        if ids:
            shown = ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")
            rows.append((reason, f"-{len(ids):,}", f"{meaning}: {shown}"))
    return [*rows, ("kept", f"{kept:,}", "")]
