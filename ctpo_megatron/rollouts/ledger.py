"""Where every prompt went that a run has drawn: nothing that was consumed is lost, and nothing is trained on twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ctpo_megatron.data.batch import Batch
from ctpo_megatron.data.prompt import Prompt

_SHOWN = 5


class AccountingError(RuntimeError):
    """Prompts are lost or there twice; the message has all numbers. It is a bug of ctpo-megatron."""


class Ledger:
    """Counts what is settled, and knows what is under way by id: a prompt comes again in every epoch."""

    def __init__(self) -> None:
        self._settled = Counter({"trained": 0, "dropped": 0, "quarantined": 0})
        self._under_way: Counter[str] = Counter()
        self._given_up = 0

    def draw(self, prompts: Iterable[Prompt]) -> None:
        """These were taken from the stream."""
        self._under_way.update(prompt.id for prompt in prompts)

    def replace(self, prompt: Prompt) -> None:
        """This one was taken in the place of one that is quarantined."""
        self._given_up += 1
        self.draw([prompt])

    def hand_over(self, batch: Batch) -> None:
        """A batch is trained on."""
        for name, groups in (("trained", batch.groups), ("dropped", list(batch.dropped.values()))):
            self._settled[name] += len(groups)
            self._under_way.subtract(group.prompt.id for group in groups)

    def give_up(self, prompts: Iterable[Prompt]) -> None:
        """The groups of these are not waited for."""
        ids = [prompt.id for prompt in prompts]
        self._settled["dropped"] += len(ids)
        self._under_way.subtract(ids)

    def check(
        self, consumed: int, buffered: Collection[str], in_flight: Collection[str], quarantined: Collection[str]
    ) -> None:
        """Raises AccountingError unless consumed = trained + dropped + quarantined + buffered + in flight, id by id.

        consumed: prompts taken since the beginning of the run, by the position of the stream. buffered, in_flight: ids
        of the groups that are scored, and of those that are played or scored now. quarantined: all ids that are.
        """
        there = Counter([*buffered, *in_flight])
        missing, surplus = self._under_way - there, there - self._under_way
        if missing.total() == self._given_up and set(missing) <= set(quarantined):
            self._settled["quarantined"] += self._given_up
            self._under_way, self._given_up, missing = +(self._under_way - missing), 0, Counter()
        numbers = {**self._settled, "buffered": len(buffered), "in flight": len(in_flight)}
        if missing or surplus or consumed != sum(numbers.values()):
            sides = " + ".join(f"{count} {name}" for name, count in numbers.items())
            raise AccountingError(
                f"{consumed} prompts were consumed, but {sides} = {sum(numbers.values())}; missing: "
                f"{list(missing)[:_SHOWN]}, not drawn: {list(surplus)[:_SHOWN]}: please report it, with the log"
            )

    def state_dict(self) -> dict[str, int]:
        """The counts of what is settled."""
        return dict(self._settled)

    def load_state_dict(self, state: Mapping[str, Any], under_way: Iterable[Prompt]) -> None:
        """Continue from counts of `state_dict`, with these prompts under way."""
        self._settled = Counter(state)
        self._under_way, self._given_up = Counter(), 0
        self.draw(under_way)
