"""`data.sampler`: a user's own order of the prompts, which may follow their rewards, as a part of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ctpo_megatron.base.extensions import call_problem, called, load
from ctpo_megatron.config import Extension
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.sampler import PromptStream, digest_of

_METHODS = ("next", "learn", "state", "load_state")


class Sampler(Protocol):
    """Chooses the prompts. It is created as `Name(prompts, seed, **arguments)`: all training prompts, and `run.seed`.

    The same calls must give the same ids, also after `load_state` of what `state` returned at that point.
    """

    def next(self, count: int) -> Sequence[str]:
        """Return the ids of the next `count` prompts; an id may come again."""

    def learn(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Called once for each batch that the trainer gets: the rewards of each prompt's samples, by the prompt's id.

        Samples without a verdict are left out. With `rollout.max_staleness` later batches have been drawn already;
        with `rollout.lag` it is called once all of them are sampled, so that the timing changes no draw.
        """

    def state(self) -> Any:
        """Return all that the next draws depend on, as JSON."""

    def load_state(self, state: Any) -> None:
        """Continue from what `state` returned."""


def sampler_problem(part: Extension) -> str:
    """Return why `part` cannot be a sampler, or "". Raises ExtensionError when it cannot be imported."""
    if not part.is_path:
        return "no such sampler; write package.module:Name, or null for the order of the data"
    found: Any = load(part.name)
    if not isinstance(found, type):
        return "is no class"
    if missing := [name for name in _METHODS if not callable(getattr(found, name, None))]:
        return f"has no method {', '.join(missing)}; a sampler has {', '.join(_METHODS)}"
    return call_problem(found, ("prompts", "seed"), part.arguments)


class Curriculum(PromptStream):
    """The `PromptStream` that a user's sampler chooses. What the sampler raises is a ValueError that names it."""

    def __init__(self, part: Extension, prompts: Sequence[Prompt], seed: int, *, rerendered: bool = False) -> None:
        """Raises ExtensionError, ValueError."""
        super().__init__(prompts, seed, rerendered=rerendered)
        self._name, self._digest = part.name, digest_of(prompts)
        self._by_id = {prompt.id: prompt for prompt in prompts}
        with self._users("its creation"):
            self._sampler: Sampler = load(part.name)(list(prompts), seed, **part.arguments)

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts. Raises ValueError when the sampler fails, or names others than there are."""
        with self._users("next"):
            ids = list(self._sampler.next(count))
        returned = f"data.sampler, {self._name}: next({count}) returned"
        if len(ids) != count:
            raise ValueError(f"{returned} {len(ids)} ids, not {count}")
        if unknown := [each for each in ids if not isinstance(each, str) or each not in self._by_id]:
            raise ValueError(f"{returned} {unknown[0]!r}, which is no prompt's id")
        self.taken += count
        return [self._by_id[each] for each in ids]

    def learn(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Tell the sampler the rewards of a batch that was trained on. Raises ValueError when it fails."""
        with self._users("learn"):
            self._sampler.learn({name: list(values) for name, values in rewards.items()})

    def state_dict(self) -> dict[str, Any]:
        """{sampler, seed, taken, digest, state}: the class, and its own state. Raises ValueError if that is no JSON."""
        with self._users("state"):
            state = json.loads(json.dumps(self._sampler.state(), allow_nan=False))
        position = {"seed": self._seed, "taken": self.taken, "digest": self._digest}
        return {"sampler": self._name, **position, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ValueError when it is of another sampler, seed or other prompts."""
        if state.get("sampler") != self._name:
            begun = f"with data.sampler {state['sampler']}" if "sampler" in state else "without data.sampler"
            raise ValueError(f"the run was begun {begun}, this one has {self._name}: give it what it was begun with")
        self._check_seed(state)
        if state["taken"]:
            self._check_digest(state)
        with self._users("load_state"):
            self._sampler.load_state(json.loads(json.dumps(state["state"])))
        self.taken = state["taken"]

    @contextmanager
    def _users(self, what: str) -> Iterator[None]:
        try:
            with called("the sampler"):
                yield
        except Exception as error:  # a user's class may raise anything
            raise ValueError(f"data.sampler, {self._name}: {what} failed: {error!r}") from error
