"""Compares texts by their words: near duplicates, and word-for-word overlaps."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

Words = tuple[str, ...]

_SHINGLE = 3
_WORD = re.compile(r"\\?[a-z]+|\d+(?:\.\d+)?|[^\W\d_]+|[-+*/^=<>|%!]")
_SAME = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cdot": "*", "\\times": "*", "\\leq": "\\le", "\\geq": "\\ge"}
_LAYOUT = {"\\left", "\\right", "\\displaystyle", "\\text", "\\mathrm", "\\quad", "\\begin", "\\end"}


def words_of(text: str) -> Words:
    """Words, numbers, operators and LaTeX commands in lower case, without spaces, punctuation and layout."""
    found = _WORD.findall(unicodedata.normalize("NFKC", text).lower())
    return tuple(_SAME.get(word, word) for word in found if word not in _LAYOUT)


def near_duplicates(texts: Sequence[Words], threshold: float, same: Callable[[int, int], bool]) -> dict[int, int]:
    """Index of a text -> the earlier text that it repeats; other texts are missing.

    Two texts are near duplicates when they contain the same numbers, their sets of word trigrams overlap by at least
    `threshold` (Jaccard), and `same` is true of their indices. The search is exact: such texts share one of their
    rarest trigrams (prefix filter: Bayardo, Ma and Srikant 2007).
    """
    sets = [frozenset(grams(words, min(_SHINGLE, len(words)))) for words in texts]
    frequency = Counter(gram for each in sets for gram in each)
    groups: dict[Words, list[int]] = defaultdict(list)
    for index, words in enumerate(texts):
        groups[tuple(sorted(word for word in words if word[0].isdigit()))].append(index)
    near: dict[int, int] = {}
    for group in groups.values():
        by_gram: dict[Words, list[int]] = defaultdict(list)
        for index in group:
            rare = sorted(sets[index], key=lambda gram: (frequency[gram], gram))
            prefix = rare[: len(rare) - math.ceil(threshold * len(rare)) + 1]
            candidates = sorted({other for gram in prefix for other in by_gram[gram]})
            found = (o for o in candidates if _jaccard(sets[index], sets[o]) >= threshold and same(index, o))
            if (original := next(found, None)) is not None:
                near[index] = original
                continue
            for gram in prefix:
                by_gram[gram].append(index)
    return near


def overlaps(
    texts: Sequence[Words], held_out: Mapping[str, Words], size: int, common: int
) -> tuple[dict[int, tuple[str, str]], list[str]]:
    """Index of a text -> (name, shared words) of a held-out text that it equals or shares `size` successive words with.

    Word sequences in more than `common` of the texts are idioms ("where m and n are relatively prime positive
    integers"), not copies; they are returned, too.
    """
    whole = {words: name for name, words in held_out.items()}
    parts = {gram: name for name, words in held_out.items() for gram in grams(words, size)}
    hits: dict[Words, list[int]] = defaultdict(list)
    for index, words in enumerate(texts):
        for gram in dict.fromkeys(grams(words, size)):
            if gram in parts:
                hits[gram].append(index)
    found: dict[int, tuple[str, str]] = {}
    for gram, indices in hits.items():
        if len(indices) <= common:
            for index in indices:
                found.setdefault(index, (parts[gram], " ".join(gram)))
    for index, words in enumerate(texts):
        if words in whole:
            found[index] = (whole[words], "the whole text")
    return found, sorted(" ".join(gram) for gram, indices in hits.items() if len(indices) > common)


def grams(words: Words, size: int) -> Iterable[Words]:
    """All sequences of `size` successive words; none for a shorter text."""
    return (words[start : start + size] for start in range(len(words) - size + 1))


def _jaccard(one: frozenset[Words], other: frozenset[Words]) -> float:
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared) if one or other else 1.0
