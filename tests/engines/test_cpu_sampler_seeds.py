"""Seeds that are drawn ahead: those that the generators would give one by one."""

from __future__ import annotations

import gc

import torch

from ctpo_megatron.engines.cpu.sampler_seeds import Draws


def generators(count: int) -> list[torch.Generator]:
    made = [torch.Generator() for _ in range(count)]
    for number, generator in enumerate(made):
        generator.manual_seed(1000 + number)
    return made


def one_by_one(generator: torch.Generator, count: int) -> list[int]:
    return [int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)) for _ in range(count)]


def test_the_numbers_of_each_generator_in_its_order() -> None:
    expected = [one_by_one(generator, 100) for generator in generators(3)]
    draws, mine = Draws(), generators(3)
    found: list[list[int]] = [[], [], []]
    for step in range(150):
        playing = [number for number in range(3) if step % (number + 1) == 0]  # they come and go, as preempted ones do
        for number, drawn in zip(playing, draws.next([mine[number] for number in playing]), strict=True):
            found[number].append(drawn)
    assert [len(drawn) for drawn in found] == [150, 75, 50]
    assert all(drawn[:100] == right[: len(drawn)] for drawn, right in zip(found, expected, strict=True))


def test_what_is_left_goes_with_its_generator() -> None:
    draws, mine = Draws(), generators(2)
    draws.next(mine)
    assert len(draws._left) == 2
    del mine[0]
    gc.collect()
    assert len(draws._left) == 1
