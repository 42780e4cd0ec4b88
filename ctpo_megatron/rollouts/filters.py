"""`rollout.filters`: masks tokens in the loss alone; ratio and position still count them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from ctpo_megatron.base.extensions import call_problem, called, load
from ctpo_megatron.config import Extension
from ctpo_megatron.data import Group, Prompt, Trajectory

Filter = Callable[[Trajectory, Prompt], Collection[int]]
"""Numbers of the turns (from 1) of a scored trajectory whose tokens are masked."""


def void_turn(trajectory: Trajectory, _prompt: Prompt, *, answer: str | None = None) -> Collection[int]:
    """Return every turn, if one has neither a complete tool call nor, as the last, a final answer (SimpleTIR).

    A call that cannot be read (`parse_error`) is not complete; a failed call is, and the last one of `max_turns` or
    `tool_budget`, which is not run. answer: regular expression of a final answer; None: a complete `\\boxed{}`.
    """
    turns = range(1, trajectory.turns + 1)
    complete = {call.turn for call in trajectory.tool_calls if call.status != "parse_error"}
    if trajectory.finish_reason in ("max_turns", "tool_budget") or _has_answer(trajectory, answer):
        complete.add(turns[-1])
    return () if complete.issuperset(turns) else turns


def void_trajectory(trajectory: Trajectory, _prompt: Prompt, *, answer: str | None = None) -> Collection[int]:
    """Return every turn, if no tool call was run and there is no final answer (the rule of CTPO's published code)."""
    called = any(call.status != "parse_error" for call in trajectory.tool_calls)
    return () if called or _has_answer(trajectory, answer) else range(1, trajectory.turns + 1)


def truncated(trajectory: Trajectory, _prompt: Prompt) -> Collection[int]:
    """Return every turn, if a token limit ended the trajectory (`finish_reason` is `length`)."""
    return range(1, trajectory.turns + 1) if trajectory.finish_reason == "length" else ()


def failed_tool(trajectory: Trajectory, _prompt: Prompt) -> Collection[int]:
    """Return the turns with a tool call that failed, or that could not be read; the other turns stay."""
    return {call.turn for call in trajectory.tool_calls if call.status != "success"}


def _has_answer(trajectory: Trajectory, answer: str | None) -> bool:
    if answer is not None:
        return re.search(answer, trajectory.final_text) is not None
    from ctpo_answers import last_boxed  # engines import this package, and score nothing

    return last_boxed(trajectory.final_text) is not None


_OURS: Sequence[Callable[..., Collection[int]]] = (void_turn, void_trajectory, truncated, failed_tool)
FILTERS = {function.__name__: function for function in _OURS}


def filter_problem(part: Extension) -> str:
    """Return why `part` cannot be a filter, or "". Raises ExtensionError when it cannot be imported."""
    if not part.is_path and part.name not in FILTERS:
        return f"no such filter; write {', '.join(FILTERS)} or package.module:Name"
    found: Any = load(part.name) if part.is_path else FILTERS[part.name]
    if isinstance(found, type) or not callable(found):
        return "is not a function of (trajectory, prompt)"
    return call_problem(found, ("trajectory", "prompt"), part.arguments)


class Filters:
    """The configured filters; `extensions.activate` comes first. Raises ExtensionError."""

    def __init__(self, parts: Sequence[Extension]) -> None:
        self._filters: dict[str, Filter] = {
            part.short_name: partial(load(part.name) if part.is_path else FILTERS[part.name], **part.arguments)
            for part in parts
        }

    def apply(self, groups: Sequence[Group]) -> dict[str, float]:
        """Write the `loss_mask` of every trajectory: its model tokens, without the turns that a filter names.

        One without a verdict has no token in the loss; no filter sees it, and none of the figures counts it. Returns
        `rollout/masked_tokens` (share of masked model tokens), `rollout/masked_trajectories` (share without a token in
        the loss) and `filter/<name>` (trajectories with tokens masked by the filter); empty without filters. Raises
        ValueError when a filter fails or returns a turn that does not exist.
        """
        kept, model = list[int](), 0
        taken = Counter(dict.fromkeys(self._filters, 0))
        for trajectory, prompt in [(trajectory, group.prompt) for group in groups for trajectory in group.trajectories]:
            if trajectory.no_verdict is not None:
                _mask(trajectory, set(trajectory.turn))
                continue
            turns = {name: self._turns(name, trajectory, prompt) for name in self._filters}
            taken.update(name for name, found in turns.items() if found)
            _mask(trajectory, set().union(*turns.values()))
            kept.append(trajectory.loss_tokens)
            model += trajectory.model_tokens
        if not self._filters or not kept:
            return {}
        shares = {"rollout/masked_tokens": 1 - sum(kept) / model}
        shares["rollout/masked_trajectories"] = kept.count(0) / len(kept)
        return shares | {f"filter/{name}": float(count) for name, count in taken.items()}

    def _turns(self, name: str, trajectory: Trajectory, prompt: Prompt) -> set[int]:
        where = f"rollout.filters, {name}, prompt {prompt.id!r} sample {trajectory.sample_index}"
        try:
            with called("the filter"):
                turns = set(self._filters[name](trajectory, prompt))
        except Exception as error:  # a user's function may raise anything
            raise ValueError(f"{where}: {error!r}") from error
        if unknown := turns.difference(range(1, trajectory.turns + 1)):
            raise ValueError(f"{where}: names turns {unknown}; there are 1 to {trajectory.turns}")
        return turns


def _mask(trajectory: Trajectory, turns: set[int]) -> None:
    """From `response_mask`, so that a recording that is replayed has the mask of this run's filters."""
    tokens = trajectory.tokens
    mask = tokens["response_mask"] & ~np.isin(tokens["turn"], list(turns))
    if not np.array_equal(mask, tokens["loss_mask"]):
        trajectory.loss_mask = mask
