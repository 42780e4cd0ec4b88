"""Addresses of trajectories, the same on every page of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ctpo_megatron.base.run_paths import EVALUATION, TRAJECTORIES
from ctpo_megatron.tracking import Head

Source = Literal["training", "evaluation"]
FOLDERS: dict[Source, str] = {"training": TRAJECTORIES, "evaluation": EVALUATION}
_NAMES: dict[Source, str] = {"training": "step", "evaluation": "evaluation"}
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
