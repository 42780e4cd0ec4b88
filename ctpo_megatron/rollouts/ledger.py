"""Where every drawn prompt goes: none that was consumed is lost, none is trained on twice, and few may fail."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ctpo_megatron.data import PromptStream
from ctpo_megatron.data.batch import Batch
from ctpo_megatron.data.prompt import Prompt

log = logging.getLogger(__name__)

_SHOWN = 5
_DRAWS = 1000


class AccountingError(RuntimeError):
    """Prompts are lost or there twice; the message has all numbers. It is a bug of ctpo-megatron."""


class Ledger:
    """Draws prompts and accounts for them: counts what is settled, and knows what is under way by id.

    A prompt comes again in every epoch, so ids are counted.
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

    def replacements(self) -> Iterator[Prompt]:
        """The next prompts of the stream, each instead of a quarantined one. Endless."""
        while True:
            self._replaced += 1
            yield self.take(1)[0]

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
        # A replacement is drawn from the stream as well, so for each one a quarantined id has no group any more.
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


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A prompt that will not be sampled again. step: when its group was discarded; cause: its last failure."""

    prompt_id: str
    step: int
    cause: str

    def __str__(self) -> str:
        return f"prompt {self.prompt_id!r} (step {self.step}): {self.cause}"


class TooManyQuarantined(RuntimeError):
    """More prompts failed than the run may lose; the message names them, the causes, and what to do."""


class Quarantine:
    """The quarantined prompts of one run, oldest first.

    limit: `rollout.max_quarantined`. records: a resumed run fills in the earlier ones.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records: list[Quarantined] = []

    def __contains__(self, prompt_id: str) -> bool:
        return any(record.prompt_id == prompt_id for record in self.records)

    def add(self, record: Quarantined) -> None:
        """Add a prompt and log it. Raises TooManyQuarantined beyond the limit."""
        self.records.append(record)
        log.warning("quarantined, will not be sampled again: %s", record)
        if len(self.records) > self.limit:
            raise TooManyQuarantined(
                f"{len(self.records)} prompts were quarantined, more than rollout.max_quarantined = {self.limit}; "
                f"the last: {'; '.join(map(str, self.records[-_SHOWN:]))}. Remove the cause, or take these prompts "
                "out of the data; if single failures are expected, raise rollout.max_group_retries, "
                "rollout.group_timeout_s or rollout.max_quarantined. Engine logs are in <run>/logs"
            )

    def draw(self, replacements: Iterator[Prompt]) -> Prompt:
        """The next replacement that is not quarantined. Raises TooManyQuarantined when all are."""
        # An endless stream that visits every prompt once an epoch has no longer row of quarantined ones than twice
        # their number. In a mix a file that has no others may be drawn again and again.
        draws = _DRAWS * (len(self.records) + 1)
        for _ in range(draws):
            prompt = next(replacements)
            if prompt.id not in self:
                return prompt
        raise TooManyQuarantined(
            f"{draws} prompts drawn in a row are all quarantined: remove the cause, or have data.sampler or the "
            f"weights of data.train choose others; the last: {'; '.join(map(str, self.records[-_SHOWN:]))}"
        )
