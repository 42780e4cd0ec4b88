"""Filters raw problems for training, in a fixed order; every dropped problem has one reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from examples.prepare_data.problems import Dropped, RawProblem, Reason
from examples.prepare_data.words import near_duplicates, overlaps, words_of

Found = Mapping[int, str]
"""Index of a problem -> why it is dropped."""

MEANING: dict[Reason, str] = {
    "unreadable": "no text or no answer",
    "unverifiable": "math_verify gives every answer 0",
    "conflict": "the same text with another answer: which is right cannot be told",
    "duplicate": "the same text as an earlier one",
    "near duplicate": "nearly the text of an earlier one, same numbers, same answer",
    "contaminated": "shares its text with an evaluation file",
    "overlong": "more tokens than --max-tokens",
}


@dataclass(frozen=True)
class Settings:
    """near: overlap from which two problems count as near duplicates (above 1: never).

    ngram: successive words shared with an evaluation file that make a problem contaminated; common: unless more than
    this many problems have them. max_tokens: longest prompt; None: any.
    """

    near: float = 0.8
    ngram: int = 13
    common: int = 10
    max_tokens: int | None = None


@dataclass
class Refined:
    """The problems that remain, the dropped ones, and the phrases that were too common to count as copies."""

    kept: list[RawProblem]
    dropped: list[Dropped] = field(default_factory=list)
    common_phrases: list[str] = field(default_factory=list)

    def drop(self, reason: Reason, found: Found) -> None:
        """Drop problems by their index."""
        for index, detail in sorted(found.items()):
            problem = self.kept[index]
            self.dropped.append(Dropped(problem.file, problem.row, problem.id, reason, detail))
        self.kept = [problem for index, problem in enumerate(self.kept) if index not in found]


def refine(
    problems: Sequence[RawProblem],
    settings: Settings,
    *,
    held_out: Mapping[str, str],
    unverifiable: Callable[[Sequence[str]], Found],
    tokens: Callable[[Sequence[str]], Sequence[int]] | None,
) -> Refined:
    """Apply all filters in turn.

    held_out: name -> text of evaluation problems. unverifiable: returns the answers that no response can match, with
    the reason. tokens: lengths of prompts; None if `settings.max_tokens` is.
    """
    result = Refined(list(problems))
    result.drop("unverifiable", unverifiable([problem.answer for problem in result.kept]))
    conflicts, duplicates = _same_text(result.kept)
    result.drop("conflict", conflicts)
    result.drop("duplicate", _same_text(result.kept)[1] if conflicts else duplicates)
    kept = result.kept
    answers = [words_of(problem.answer) for problem in kept]
    texts = [words_of(problem.text) for problem in kept]
    near = near_duplicates(texts, settings.near, lambda i, j: answers[i] == answers[j])
    result.drop("near duplicate", {index: f"of {kept[first].id}" for index, first in near.items()})
    others = {name: words_of(text) for name, text in held_out.items()}
    texts = [words_of(problem.text) for problem in result.kept]
    copies, result.common_phrases = overlaps(texts, others, settings.ngram, settings.common)
    result.drop("contaminated", {index: f"{name}: {shared}" for index, (name, shared) in copies.items()})
    if tokens is not None and settings.max_tokens is not None:
        lengths = tokens([problem.text for problem in result.kept])
        result.drop("overlong", {i: f"{n} tokens" for i, n in enumerate(lengths) if n > settings.max_tokens})
    return result


def _same_text(problems: Sequence[RawProblem]) -> tuple[dict[int, str], dict[int, str]]:
    """Problems with the same text but different answers, and problems that repeat an earlier one with its answer."""
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, problem in enumerate(problems):
        alike[words_of(problem.text)].append(index)
    conflicts: dict[int, str] = {}
    duplicates: dict[int, str] = {}
    for first, *others in alike.values():
        answers = {words_of(problems[index].answer) for index in (first, *others)}
        if len(answers) > 1:
            shown = ", ".join(sorted({problems[index].answer for index in (first, *others)}))
            conflicts |= dict.fromkeys((first, *others), f"answers {shown}")
        else:
            duplicates |= dict.fromkeys(others, f"of {problems[first].id}")
    return conflicts, duplicates


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
