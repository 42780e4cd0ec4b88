"""Prompts whose groups failed too often: the cause of each, and how many a run may lose."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from ctpo_megatron.data.prompt import Prompt

log = logging.getLogger(__name__)

_SHOWN = 5


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


class Replacements(Protocol):
    """An endless stream over the prompts of the data, each once an epoch."""

    def draw(self) -> Prompt:
        """The next prompt, which is consumed."""


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

    def draw(self, replacements: Replacements) -> Prompt:
        """The next replacement that is not quarantined. Raises TooManyQuarantined when all are."""
        # An endless stream that visits every prompt once an epoch has no longer row of quarantined ones than this.
        for _ in range(2 * len(self.records) + 1):
            prompt = replacements.draw()
            if prompt.id not in self:
                return prompt
        raise TooManyQuarantined(
            f"all prompts of the data are quarantined; the last: {'; '.join(map(str, self.records[-_SHOWN:]))}"
        )
