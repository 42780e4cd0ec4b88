"""The text of a trajectory, piece by piece, and how many characters of it each token of the model contributes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.tracking.records import Decode, Record, YieldGil

_BYTES = 4
"""No UTF-8 character needs more tokens than it has bytes."""
_BROKEN = "\ufffd"
_SINGLE = 32
"""Decoding a single token takes as long as this number of tokens of a text."""


class Texts:
    """Text of trajectories; remembers the text of single tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode, self._yield_gil = decode, YieldGil()
        self._texts: dict[int, str] = {}

    def segments(self, token_ids: Sequence[int], turn: Sequence[int], response_mask: Sequence[int]) -> list[Record]:
        """Return runs of tokens of one origin: {turn, kind: prompt|model|observation, text}.

        A model's has `token_chars` too, an array of the characters of the text that each token contributes; one spread
        over several tokens counts for the last. It is absent where the tokenizer does not decode token by token.
        """
        ids, turns, by_model = np.asarray(token_ids), np.asarray(turn), np.asarray(response_mask)
        changes = np.flatnonzero((turns[1:] != turns[:-1]) | (by_model[1:] != by_model[:-1])) + 1
        found = []
        for start, end in zip([0, *changes.tolist()], [*changes.tolist(), len(ids)], strict=True):
            if start == end:
                continue
            kind = "prompt" if turns[start] == 0 else "model" if by_model[start] else "observation"
            listed = ids[start:end].tolist()
            segment: Record = {"turn": int(turns[start]), "kind": kind, "text": self._decode(listed)}
            self._yield_gil.after(len(listed))
            if kind == "model" and (lengths := self._chars(listed, segment["text"])) is not None:
                segment["token_chars"] = lengths
            found.append(segment)
        return found

    def _chars(self, ids: list[int], text: str) -> NDArray[Any] | None:
        """Return the characters of `text` a token; None where the texts of the tokens are not the text of all."""
        for token in {*ids} - self._texts.keys():
            self._yield_gil.after(_SINGLE)
            self._texts[token] = self._decode([token])
        pieces = [*map(self._texts.__getitem__, ids)]
        if "".join(pieces) != text:
            self._join(ids, pieces)
        return np.fromiter(map(len, pieces), np.int32, len(ids)) if "".join(pieces) == text else None

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


@functools.lru_cache(maxsize=1)
def texts_of(decode: Decode) -> Texts:
    """Return one for all dumps of a run: each single token is decoded once."""
    return Texts(decode)
