"""Prompts that failed too often, and are not sampled again; few of them may be lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ctpo_megatron.data.prompt import Prompt

log = logging.getLogger(__name__)

_SHOWN = 5
_DRAWS = 1000


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
    """The quarantined prompts of one run. limit: `rollout.max_quarantined`. records: oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records: list[Quarantined] = []

    def __contains__(self, prompt: Prompt) -> bool:
        return any(record.prompt_id == prompt.id for record in self.records)

    def __str__(self) -> str:
        return "; ".join(map(str, self.records[-_SHOWN:]))

    def add(self, record: Quarantined) -> None:
        """Add a prompt and log it. Raises TooManyQuarantined beyond the limit."""
        self.records.append(record)
        log.warning("quarantined, will not be sampled again: %s", record)
        if len(self.records) > self.limit:
            raise TooManyQuarantined(
                f"{len(self.records)} prompts were quarantined, more than rollout.max_quarantined = {self.limit}; "
                f"the last: {self}. Remove the cause, or take these prompts out of the data; if single failures "
                "are expected, raise rollout.max_group_retries, rollout.group_timeout_s or rollout.max_quarantined. "
                "Engine logs are in <run>/logs"
            )

    def replace(self, prompt: Prompt, draw: Callable[[], Prompt]) -> tuple[Prompt, int]:
        """Return the prompt, or the next one that is not quarantined, and how many were drawn for it.

        Raises TooManyQuarantined after more draws than any but a mix, of a file that has no others, can need.
        """
        limit = _DRAWS * (len(self.records) + 1)
        for drawn in range(limit):
            if prompt not in self:
                return prompt, drawn
            prompt = draw()
        raise TooManyQuarantined(
            f"{limit} prompts drawn in a row are all quarantined: remove the cause, or have data.sampler or the "
            f"weights of data.train choose others; the last: {self}"
        )
