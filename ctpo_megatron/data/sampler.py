"""Draws prompts in a reproducible, resumable order."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any

from ctpo_megatron.data.prompt import Prompt

log = logging.getLogger(__name__)


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.token_ids, prompt.answer]).encode())
    return digest.hexdigest()


class PromptSampler:
    """Endless stream over `prompts`: every epoch visits each once, in an order that depends on seed and epoch only."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True, *, rerendered: bool = False) -> None:
        """rerendered: continue from a state whose prompts had other tokens. Raises ValueError when there is nothing to
        sample from."""
        if not prompts:
            raise ValueError("a prompt sampler needs at least one prompt")
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._rerendered = rerendered
        self._digest = _digest(prompts)
        self._start(epoch=0, cursor=0)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; a batch that crosses the end of an epoch continues with the next epoch."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._cursor == len(self._order):
                self._start(self._epoch + 1, cursor=0)
            indices = self._order[self._cursor : self._cursor + count - len(taken)]
            taken += [self._prompts[index] for index in indices]
            self._cursor += len(indices)
        return taken

    @property
    def taken(self) -> int:
        """Prompts taken since the beginning of the run."""
        return self._epoch * len(self._prompts) + self._cursor

    def named(self, ids: Collection[str]) -> dict[str, Prompt]:
        """The prompts with these ids. Raises ValueError for an unknown id."""
        found = {prompt.id: prompt for prompt in self._prompts if prompt.id in ids}
        if unknown := sorted(set(ids) - set(found)):
            raise ValueError(f"{len(unknown)} prompts are not in the data, e.g. {unknown[0]!r}")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream: {epoch, cursor, seed}, and what identifies the stream.

        consumed: the ids taken from this epoch, in order. digest: blake2b-128, in hexadecimal, of all prompts.
        """
        consumed = [self._prompts[index].id for index in self._order[: self._cursor]]
        position = {"epoch": self._epoch, "cursor": self._cursor, "seed": self._seed}
        return position | {"consumed": consumed, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, so that every prompt of the epoch is taken exactly once.

        Raises ValueError when this stream would not have produced the prompts of `state`, or has other prompts, tokens
        or answers under their ids. Any stream is accepted if no prompt was taken yet.
        """
        if state["seed"] != self._seed:
            raise ValueError(f"the saved prompt order used seed {state['seed']}, this run uses seed {self._seed}")
        if not 0 <= state["cursor"] <= len(self._prompts):
            raise ValueError(
                f"the saved position is {state['cursor']}, but there are {len(self._prompts)} prompts: other data?"
            )
        self._start(state["epoch"], state["cursor"])
        for place, (ours, saved) in enumerate(zip(self.state_dict()["consumed"], state["consumed"], strict=True)):
            if ours != saved:
                raise ValueError(
                    f"prompt {place + 1} of epoch {state['epoch']} was {saved!r}, these data give {ours!r}: "
                    "give the run the data.train and data.shuffle that it was begun with"
                )
        if state["digest"] == self._digest or (state["epoch"], state["cursor"]) == (0, 0):
            return
        if not self._rerendered:
            raise ValueError(
                "prompts have other tokens or answers under the same ids, or there are others: give the run the "
                "data.train, data.system_prompt, data.tool_in_prompt, tokenizer and chat template that it was begun "
                "with; data.rerender=true continues with the prompts as they are rendered now"
            )
        log.warning("data.rerender=true: continuing with prompts that have other tokens or answers than before")

    def _start(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = list(range(len(self._prompts)))
        if self._shuffle:
            Random(f"{self._seed}/{epoch}").shuffle(self._order)
