"""Addresses of trajectories, the same in the report and in `ctpo watch`, and the heads of a dump in columns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.base.run_paths import EVALUATION, TRAJECTORIES
from ctpo_megatron.tracking import Head

Source = Literal["training", "evaluation"]
FOLDERS: dict[Source, str] = {"training": TRAJECTORIES, "evaluation": EVALUATION}
_NAMES: dict[Source, str] = {"training": "step", "evaluation": "evaluation"}
_SOURCES = {name: source for source, name in _NAMES.items()}
_FORM = re.compile(r"(step|evaluation)-(\d{1,18})-([A-Za-z0-9_.~-]*)-(\d{1,9})(?:\.(\d{1,9}))?")
_UNSAFE = re.compile(rb"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class Address:
    """Names one trajectory of a run; as text an id of HTML, a fragment and a part of a path: `step-24-aime-7-3`.

    repeat: how many trajectories of the same prompt and sample index come before it in the dump: a step may draw a
    prompt twice.
    """

    source: Source
    step: int
    prompt_id: str
    sample_index: int
    repeat: int = 0

    def __str__(self) -> str:
        again = f".{self.repeat}" if self.repeat else ""
        return f"{_NAMES[self.source]}-{self.step}-{_escaped(self.prompt_id)}-{self.sample_index}{again}"

    @classmethod
    def parse(cls, text: str) -> Address | None:
        """The address of a text; None if it is none."""
        if not (match := _FORM.fullmatch(text)):
            return None
        name, step, prompt, sample, repeat = match.groups()
        found = cls(_SOURCES[name], int(step), _plain(prompt), int(sample), int(repeat or 0))
        return found if str(found) == text else None


Addressed = tuple[Address, Head]


def addresses(source: Source, step: int, heads: Iterable[Head]) -> Iterator[Address]:
    """The address of each trajectory of a dump, in order."""
    seen: dict[tuple[str, int], int] = {}
    for head in heads:
        key = (head.prompt_id, head.sample_index)
        repeat = seen.get(key, 0)
        seen[key] = repeat + 1
        yield Address(source, step, head.prompt_id, head.sample_index, repeat)


def _escaped(prompt_id: str) -> str:
    """With bytes of UTF-8 that a path cannot have as they are, and `~`, as `~2F`."""
    return _UNSAFE.sub(lambda byte: b"~%02X" % byte[0][0], prompt_id.encode("utf-8", "surrogatepass")).decode("ascii")


def _plain(escaped: str) -> str:
    plain = re.sub(rb"~([0-9A-F]{2})", lambda code: bytes([int(code[1], 16)]), escaped.encode("ascii"))
    return plain.decode("utf-8", "replace")


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
    """The heads of a dump of n trajectories; row and place are the same. reward: float64 [n], NaN without a verdict.

    A fifth of the memory of objects, and filters look at each different text once.
    """

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
