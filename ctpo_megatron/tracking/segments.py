"""The text of a trajectory, piece by piece, and how many characters of it each token of the model contributes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.tracking.records import AT_ONCE, Decode, GiveWay, Record

_LEFT = 4
"""Tokens before a part that is decoded with it: some tokenizers look at the neighbour, none further back."""
_BYTES = 4
"""No UTF-8 character needs more tokens than it has bytes."""
_BROKEN = "\ufffd"
_MORE = 16
"""Tokens by which a part may grow, so that it does not end within a character; beyond, the text is no UTF-8 anyway."""
_SINGLE = 32
"""Decoding a single token takes as long as this number of tokens of a text."""


class Texts:
    """Text of trajectories; remembers the text of single tokens."""

    def __init__(self, decode: Decode) -> None:
        self._give_way = GiveWay()
        self._decode, self._singles = decode, _Singles(decode, self._give_way)

    def segments(self, token_ids: Sequence[int], turn: Sequence[int], response_mask: Sequence[int]) -> list[Record]:
        """Runs of tokens of one origin: {turn, kind: prompt|model|observation, text}.

        A model's has `token_chars` too, an array of the characters of the text that each token contributes; one spread
        over several tokens counts for the last. It is absent where the tokenizer does not decode token by token.
        """
        ids, turns, by_model = np.asarray(token_ids), np.asarray(turn), np.asarray(response_mask)
        changes = np.flatnonzero((turns[1:] != turns[:-1]) | (by_model[1:] != by_model[:-1])) + 1
        found = []
        for start, end in zip([0, *changes.tolist()], [*changes.tolist(), len(ids)], strict=True):
            if start < end:
                kind = "prompt" if turns[start] == 0 else "model" if by_model[start] else "observation"
                found.append({"turn": int(turns[start]), "kind": kind, **self._text(ids[start:end], kind)})
        return found

    def _text(self, ids: NDArray[Any], kind: str) -> Record:
        chars: list[NDArray[Any]] = []
        text = ""
        apart = kind == "model"
        listed = ids.tolist()
        for part, piece in self._parts(listed):
            text += piece
            if apart:
                counted = self._chars(ids[part], listed[part], piece)
                apart = counted is not None
                chars += [] if counted is None else [counted]
            self._give_way.after(part.stop - part.start)
        return {"text": text, "token_chars": np.concatenate(chars)} if apart else {"text": text}

    def _parts(self, ids: list[int]) -> Iterator[tuple[slice, str]]:
        """Places and their text, `AT_ONCE` tokens or a few more at a time. No part ends within a character."""
        start = 0
        while start < len(ids):
            left = ids[max(0, start - _LEFT) : start]
            before = self._decode(left) if left else ""
            end = min(start + AT_ONCE, len(ids))
            text = self._decode(left + ids[start:end])
            for _ in range(_MORE):
                if end == len(ids) or not text.endswith(_BROKEN):
                    break
                end += 1
                text = self._decode(left + ids[start:end])
            yield slice(start, end), text[len(before) :]
            start = end

    def _chars(self, ids: NDArray[Any], listed: list[int], text: str) -> NDArray[Any] | None:
        """Characters of `text` a token; None where the texts of the tokens are not the text of all.

        listed: the same ids.
        """
        pieces, lengths = self._singles.of(ids, listed)
        if "".join(pieces) == text:
            return lengths
        joined = [*pieces]
        self._join(listed, joined)
        return np.array([*map(len, joined)], np.int32) if "".join(joined) == text else None

    def _join(self, ids: list[int], pieces: list[str]) -> None:
        """Give characters that are spread over several tokens to the last of these."""
        done = 0
        for start in [index for index, piece in enumerate(pieces) if piece.endswith(_BROKEN)]:
            if start < done:
                continue
            done = start + 1
            while pieces[done - 1].endswith(_BROKEN) and done - start < _BYTES and done < len(ids):
                pieces[done - 1] = ""
                done += 1
                pieces[done - 1] = self._decode(ids[start:done])


class _Singles:
    """Texts of single tokens and their lengths, by id. Each is decoded once."""

    def __init__(self, decode: Decode, give_way: GiveWay) -> None:
        self._decode, self._give_way = decode, give_way
        self._texts: list[str] = []
        self._lengths = np.empty(0, np.int32)

    def of(self, ids: NDArray[Any], listed: list[int]) -> tuple[Sequence[str], NDArray[Any]]:
        """The text of each token of `ids`, at least one, and its characters. listed: the same ids."""
        missing = int(ids.max()) + 1 - len(self._texts)
        if missing > 0:
            self._texts += [""] * missing
            self._lengths = np.concatenate([self._lengths, np.full(missing, -1, np.int32)])
        lengths = self._lengths[ids]
        if (unknown := lengths < 0).any():
            for token in np.unique(ids[unknown]).tolist():
                self._give_way.after(_SINGLE)
                self._texts[token] = self._decode([token])
                self._lengths[token] = len(self._texts[token])
            lengths = self._lengths[ids]
        # itemgetter takes half the time of a loop, and gives no tuple for a single id.
        texts = itemgetter(*listed)(self._texts) if len(listed) > 1 else [self._texts[listed[0]]]
        return texts, lengths


@functools.lru_cache(maxsize=1)
def texts_of(decode: Decode) -> Texts:
    """One for all dumps of a run: each single token is decoded once."""
    return Texts(decode)
