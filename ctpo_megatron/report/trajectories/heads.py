"""Heads of a dump in columns: a fifth of the memory of objects, and filters that look at each different text once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.report.trajectories.address import Address, Source, addresses
from ctpo_megatron.tracking import Head

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class TextColumn:
    """A column of few different texts: row i is `names[codes[i]]`. codes: int32 [n]."""

    names: list[str]
    codes: NDArray[np.int32]

    @classmethod
    def of(cls, values: Sequence[str]) -> TextColumn:
        places = {name: place for place, name in enumerate(dict.fromkeys(values))}
        return cls([*places], np.array([places[value] for value in values], np.int32))

    def __getitem__(self, row: int) -> str:
        return self.names[int(self.codes[row])]

    def where(self, test: Callable[[str], bool]) -> Mask:
        """Rows whose text passes a test."""
        return np.array([test(name) for name in self.names], np.bool_)[self.codes]


@dataclass(frozen=True)
class HeadTable:
    """The heads of a dump of n trajectories; row and place are the same. reward: float64 [n], NaN without a verdict."""

    prompts: TextColumn
    causes: TextColumn
    finish_reasons: TextColumn
    tools: TextColumn
    reward: NDArray[np.float64]
    numbers: NDArray[np.int32]
    """[n, 4]: sample index, how often prompt and index came before, model tokens, whether there is a ratio."""

    @classmethod
    def of(cls, heads: Sequence[Head]) -> HeadTable:
        repeats = [address.repeat for address in addresses("training", 0, heads)]
        numbers = [
            (head.sample_index, repeat, head.model_tokens, head.traced)
            for head, repeat in zip(heads, repeats, strict=True)
        ]
        return cls(
            TextColumn.of([head.prompt_id for head in heads]),
            TextColumn.of([head.cause for head in heads]),
            TextColumn.of([head.finish_reason for head in heads]),
            TextColumn.of([head.tools for head in heads]),
            np.array([math.nan if head.reward is None else head.reward for head in heads], np.float64),
            np.array(numbers, np.int32).reshape(-1, 4),
        )

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def model_tokens(self) -> NDArray[np.int32]:
        """int32 [n]."""
        return self.numbers[:, 2]

    def head(self, place: int) -> Head:
        """The head of a row."""
        index, _, model_tokens, traced = self.numbers[place].tolist()
        reward = self.reward[place].item()
        return Head(
            place,
            self.prompts[place],
            index,
            None if math.isnan(reward) else reward,
            self.causes[place],
            self.finish_reasons[place],
            self.tools[place],
            model_tokens,
            bool(traced),
        )

    def address(self, source: Source, step: int, place: int) -> Address:
        """The address of a row of the dump of a step."""
        index, repeat, *_ = self.numbers[place].tolist()
        return Address(source, step, self.prompts[place], index, repeat)
