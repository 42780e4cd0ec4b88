"""Where every drawn prompt went: nothing that was consumed is lost, and nothing is trained on twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from ctpo_megatron.data.batch import Batch
from ctpo_megatron.data.prompt import Prompt

_SHOWN = 5


class AccountingError(RuntimeError):
    """Prompts are lost or there twice; the message has all numbers. It is a bug of ctpo-megatron."""


class PromptStream(Protocol):
    """Prompts in the order of the run: `data.PromptSampler`."""

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""

    @property
    def taken(self) -> int:
        """Prompts taken since the beginning of the run."""

    def named(self, ids: Collection[str]) -> dict[str, Prompt]:
        """The prompts with these ids. Raises ValueError for an unknown one."""

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""


class Ledger:
    """Draws prompts and accounts for them: counts what is settled, and knows what is under way by id.

    A prompt comes again in every epoch, so ids are counted. `Replacements` for groups whose prompt is quarantined.
    """

    def __init__(self, prompts: PromptStream) -> None:
        self._prompts = prompts
        self._settled = Counter({"trained": 0, "dropped": 0, "quarantined": 0})
        self._under_way: Counter[str] = Counter()
        self._replaced = 0

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts of the stream."""
        prompts = self._prompts.take(count)
        self._under_way.update(prompt.id for prompt in prompts)
        return prompts

    def draw(self) -> Prompt:
        """The next prompt, which replaces a quarantined one."""
        self._replaced += 1
        return self.take(1)[0]

    def deliver(self, batch: Batch) -> None:
        """The batch is trained on, except for its dropped groups."""
        for group in batch.groups:
            self._settled["dropped" if group.dropped else "trained"] += 1
            self._under_way[group.prompt.id] -= 1

    def discard(self, prompts: Iterable[Prompt]) -> None:
        """The groups of these are not waited for."""
        ids = [prompt.id for prompt in prompts]
        self._settled["dropped"] += len(ids)
        self._under_way.subtract(ids)

    def check(self, buffered: Collection[str], in_flight: Collection[str], quarantined: Collection[str]) -> None:
        """Raises AccountingError unless taken = trained + dropped + quarantined + buffered + in flight, id by id.

        buffered, in_flight: prompt ids of groups that are scored, and of groups that are sampled or scored now.
        quarantined: all quarantined ids.
        """
        consumed = self._prompts.taken
        there = Counter([*buffered, *in_flight])
        missing, surplus = self._under_way - there, there - self._under_way
        if missing.total() == self._replaced and set(missing) <= set(quarantined):
            self._settled["quarantined"] += self._replaced
            self._under_way, self._replaced, missing = +(self._under_way - missing), 0, Counter()
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
        self._under_way, self._replaced = Counter(prompt.id for prompt in under_way), 0
