"""Turns of several batches on one engine: whose are begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from ctpo_megatron.engines.turns import TurnScheduler


class Turns:
    """Begins turns, and notes whose are sampled."""

    def __init__(self, room: int) -> None:
        self.precedence, self.begun = TurnScheduler(room), list[int]()
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, *steps: int) -> None:
        """One turn for each."""

        async def turn(step: int) -> None:
            await self.precedence.begin(step)
            self.begun.append(step)

        self.tasks += [asyncio.ensure_future(turn(step)) for step in steps]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.precedence.end()
        await asyncio.sleep(0)


def played(scenario: Callable[[Turns, ExitStack], Any], room: int = 2) -> None:
    async def play() -> None:
        turns = Turns(room)
        with ExitStack() as stack:
            await scenario(turns, stack)
            for task in turns.tasks:
                task.cancel()
            await asyncio.gather(*turns.tasks, return_exceptions=True)
        assert not turns.precedence._in_flight and not [w for w in turns.precedence._waiting if not w[2].cancelled()]

    asyncio.run(play())


def test_a_batch_alone_is_not_held_up() -> None:
    async def alone(turns: Turns, stack: ExitStack) -> None:
        stack.enter_context(turns.precedence.trajectory(3))
        await turns.ask(*[3] * 9)
        assert turns.begun == [3] * 9

    played(alone)


def test_an_earlier_batch_comes_first_and_a_later_one_fills_the_room() -> None:
    async def two(turns: Turns, stack: ExitStack) -> None:
        earlier = stack.enter_context(ExitStack())
        earlier.enter_context(turns.precedence.trajectory(3))
        stack.enter_context(turns.precedence.trajectory(4))
        await turns.ask(4, 4, 4)
        assert turns.begun == [4, 4]
        await turns.ask(3, 3)  # with or without room
        assert turns.begun == [4, 4, 3, 3]
        await turns.end(2)
        assert turns.begun == [4, 4, 3, 3]  # two of four are sampled: as many as there is room for
        await turns.ask(3)
        await turns.end()
        assert turns.begun == [4, 4, 3, 3, 3]
        await turns.end()
        assert turns.begun == [4, 4, 3, 3, 3, 4]
        await turns.ask(4)
        earlier.close()  # it calls a tool no more, it is complete
        await asyncio.sleep(0)
        assert turns.begun == [4, 4, 3, 3, 3, 4, 4]

    played(two)


def test_of_those_that_wait_the_earliest_step_comes_first() -> None:
    async def three(turns: Turns, stack: ExitStack) -> None:
        for step in (1, 2, 3):
            stack.enter_context(turns.precedence.trajectory(step))
        await turns.ask(1, 3, 2, 3)
        assert turns.begun == [1]
        await turns.end()
        assert turns.begun == [1, 2]

    played(three, room=1)


@pytest.mark.parametrize("begun", [False, True])
def test_a_turn_that_is_given_up_leaves_its_room_to_others(begun: bool) -> None:
    async def cancelled(turns: Turns, stack: ExitStack) -> None:
        for step in (1, 2):
            stack.enter_context(turns.precedence.trajectory(step))
        await turns.ask(1, 2, 2)
        assert turns.begun == [1]
        if begun:  # in the moment in which it may begin
            turns.precedence.end()
        turns.tasks[1].cancel()
        await asyncio.sleep(0)
        if not begun:
            await turns.end()
        await asyncio.sleep(0)
        assert turns.begun == [1, 2] and turns.precedence._running == 1

    played(cancelled, room=1)
