"""Draws prompts in a reproducible, resumable order."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from ctpo_megatron.data.records import Prompt

log = logging.getLogger(__name__)


class PromptStream(ABC):
    """An endless stream of prompts, whose position is a part of a checkpoint.

    taken: prompts taken since the beginning of the run.
    """

    taken = 0
    _digest = ""
    """`digest_of` the prompts, made with the stream, while engines load; "": the stream does not compare it."""

    def __init__(self, prompts: Sequence[Prompt], seed: int | str, *, rerendered: bool = False) -> None:
        """rerendered: continue from a state whose prompts had other tokens."""
        self._prompts, self._seed, self._rerendered = prompts, seed, rerendered

    @abstractmethod
    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what identifies the stream, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there. Raises ValueError when it is of another stream."""

    def named(self, ids: Collection[str]) -> dict[str, Prompt]:
        """Return the prompts with these ids. Raises ValueError for an unknown id."""
        found = {prompt.id: prompt for prompt in self._prompts if prompt.id in ids}
        if unknown := sorted(set(ids) - set(found)):
            raise ValueError(f"{len(unknown)} prompts are not in the data, e.g. {unknown[0]!r}")
        return found

    def learn(self, rewards: Mapping[str, Sequence[float]]) -> None:  # noqa: B027 - most streams learn nothing
        """Take in the rewards of a batch that the trainer gets, by the prompt's id."""

    def metrics(self) -> dict[str, float]:
        """Of the position, by name."""
        return {}

    def _check_seed(self, state: Mapping[str, Any]) -> None:
        if state["seed"] != self._seed:
            raise ValueError(f"the saved prompt order used seed {state['seed']}, this run uses seed {self._seed}")

    def _check_digest(self, state: Mapping[str, Any]) -> None:
        if state["digest"] == self._digest:
            return
        if not self._rerendered:
            raise ValueError(
                "prompts have other tokens or answers under the same ids, or there are others: give the run the "
                "data.train, data.system_prompt, data.tool_in_prompt, tokenizer and chat template that it was begun "
                "with; data.rerender=true continues with the prompts as they are rendered now"
            )
        log.warning("data.rerender=true: continuing with prompts that have other tokens or answers than before")


def digest_of(prompts: Sequence[Prompt]) -> str:
    """blake2b-128, in hexadecimal, of ids, tokens and answers."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.token_ids, prompt.answer]).encode())
    return digest.hexdigest()


def _refuse_samplers(state: Mapping[str, Any]) -> None:
    if "sampler" in state:
        raise ValueError(f"the run was begun with data.sampler {state['sampler']}: give it that")


class PromptSampler(PromptStream):
    """Endless stream over `prompts`: every epoch visits each once, in an order that depends on seed and epoch only."""

    def __init__(
        self, prompts: Sequence[Prompt], seed: int | str, shuffle: bool = True, *, rerendered: bool = False
    ) -> None:
        """Raises ValueError when there is nothing to sample from."""
        super().__init__(prompts, seed, rerendered=rerendered)
        if not prompts:
            raise ValueError("a prompt sampler needs at least one prompt")
        self._shuffle, self._digest = shuffle, digest_of(prompts)
        self._order = lru_cache(2)(self._order_of)  # of the epochs that a batch crosses

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts; a batch that crosses the end of an epoch continues with the next epoch."""
        places = [divmod(draw, len(self._prompts)) for draw in range(self.taken, self.taken + count)]
        self.taken += count
        return [self._order(epoch)[cursor] for epoch, cursor in places]

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream: {epoch, cursor, seed}, and what identifies the stream.

        consumed: the ids taken from this epoch, in order. digest: blake2b-128, in hexadecimal, of all prompts.
        """
        epoch = max(0, self.taken - 1) // len(self._prompts)
        cursor = self.taken - epoch * len(self._prompts)
        consumed = [prompt.id for prompt in self._order(epoch)[:cursor]]
        return {"epoch": epoch, "cursor": cursor, "seed": self._seed, "consumed": consumed, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, so that every prompt of the epoch is taken exactly once.

        Raises ValueError when this stream would not have produced the prompts of `state`, or has other prompts, tokens
        or answers under their ids. Any stream is accepted if no prompt was taken yet.
        """
        _refuse_samplers(state)
        if "files" in state:
            raise ValueError("the run was begun with weights in data.train, this one has none: give it those")
        self._check_seed(state)
        if not 0 <= state["cursor"] <= len(self._prompts):
            raise ValueError(
                f"the saved position is {state['cursor']}, but there are {len(self._prompts)} prompts: other data?"
            )
        for place, (ours, saved) in enumerate(zip(self._order(state["epoch"]), state["consumed"], strict=False)):
            if ours.id != saved:
                raise ValueError(
                    f"prompt {place + 1} of epoch {state['epoch']} was {saved!r}, these data give {ours.id!r}: "
                    "give the run the data.train and data.shuffle that it was begun with"
                )
        self.taken = state["epoch"] * len(self._prompts) + state["cursor"]
        if self.taken:
            self._check_digest(state)

    def _order_of(self, epoch: int) -> list[Prompt]:
        prompts = list(self._prompts)
        if self._shuffle:
            Random(f"{self._seed}/{epoch}").shuffle(prompts)
        return prompts


@dataclass(frozen=True)
class MixedFile:
    """A part of a mix: its name, as in `data.train`, its weight, and its prompts."""

    name: str
    weight: float
    prompts: Sequence[Prompt]


class PromptMix(PromptStream):
    """Endless stream over several files: each draw is from one of them, with probability in proportion to its weight.

    Which file draw n is from depends on seed and n only. Within a file prompts come as from `PromptSampler`: each once,
    then a new epoch of that file, whatever the others do.
    """

    def __init__(
        self, files: Sequence[MixedFile], seed: int, shuffle: bool = True, *, rerendered: bool = False
    ) -> None:
        """Raises ValueError when a file with a weight above 0 has no prompts."""
        super().__init__([prompt for file in files for prompt in file.prompts], seed, rerendered=rerendered)
        self._files = files
        if empty := [file.name for file in files if file.weight and not file.prompts]:
            raise ValueError(f"data.train: {empty[0]} has a weight, and no prompts")
        self._streams = {
            number: PromptSampler(file.prompts, f"{seed}/{number}", shuffle, rerendered=rerendered)
            for number, file in enumerate(files)
            if file.prompts
        }

    def take(self, count: int) -> list[Prompt]:
        taken = []
        for _ in range(count):
            taken += self._streams[self._file_of(self.taken)].take(1)
            self.taken += 1
        return taken

    def metrics(self) -> dict[str, float]:
        """`data/drawn/<file>` (prompts drawn from it), `data/epochs/<file>` (that, as passes over the file).

        A file is named without folder and suffix, if these differ.
        """
        names = [file.name for file in self._files]
        stems = [Path(name).stem for name in names]
        labels = stems if len(set(stems)) == len(stems) else names
        found: dict[str, float] = {}
        for number, stream in self._streams.items():
            found[f"data/drawn/{labels[number]}"] = float(stream.taken)
            found[f"data/epochs/{labels[number]}"] = stream.taken / len(self._files[number].prompts)
        return found

    def state_dict(self) -> dict[str, Any]:
        """{seed, taken, weights, files}: files holds the state of each `PromptSampler`, null without prompts."""
        streams = [self._streams.get(number) for number in range(len(self._files))]
        files = [None if stream is None else stream.state_dict() for stream in streams]
        return {"seed": self._seed, "taken": self.taken, "weights": self._weights, "files": files}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ValueError when it is of other files, weights or seeds, and as
        `PromptSampler.load_state_dict`; any stream is accepted if no prompt was taken yet.
        """
        _refuse_samplers(state)
        if "files" not in state:
            raise ValueError("the run was begun without weights in data.train, this one has some: take them out")
        self._check_seed(state)
        if state["taken"] and state["weights"] != self._weights:
            raise ValueError(
                f"the run was begun with the weights {state['weights']} in data.train, this one has {self._weights}: "
                "give it those, or begin another run from the weights of its model"
            )
        self.taken = state["taken"]
        for number, stream in self._streams.items():
            saved = state["files"][number] if self.taken else None
            if saved is None:
                stream.taken = 0
                continue
            try:
                stream.load_state_dict(saved)
            except ValueError as error:
                raise ValueError(f"{self._files[number].name}: {error}") from error
        if self.taken != sum(stream.taken for stream in self._streams.values()):
            raise ValueError("a file of data.train has no prompts any more: give the run what it was begun with")

    @property
    def _weights(self) -> list[float]:
        return [file.weight for file in self._files]

    def _file_of(self, draw: int) -> int:
        file: int = Random(f"{self._seed}/mix/{draw}").choices(range(len(self._files)), self._weights)[0]
        return file
