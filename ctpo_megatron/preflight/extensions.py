"""Users' parts: what each key that names a part may hold, and how the part is checked before a run begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.base.extensions import ExtensionError, activate, load
from ctpo_megatron.config import Config, ConfigError, Extension, Problem, Sources, load_family, named_extensions
from ctpo_megatron.preflight.check import Check, RunContext, run_checks, warnings_of
from ctpo_megatron.preflight.rollout_parts import (
    check_agent,
    check_environment,
    check_parser_fits,
    check_tool,
    check_tool_parser,
)


@dataclass(frozen=True)
class PartContext:
    """A part, the key that names it, and the configuration that has both."""

    key: str
    part: Extension
    config: Config

    def problems(self, *messages: str | None) -> Iterator[Problem]:
        """Why the part cannot be used; empty messages are none."""
        yield from (Problem(self.key, message, value=self.part.name) for message in messages if message)

    def unknown(self, words: Iterable[str]) -> Iterator[Problem]:
        """Whether the name is none of our own words."""
        known = list(words)
        wanted = " or ".join([*known, "package.module:Name"])
        yield from self.problems(None if self.part.name in known else f"no such part; write {wanted}")


def check_extensions(config: Config, sources: Sources | None = None) -> None:
    """Raises ConfigError with all that is wrong with the parts that the configuration names, and where.

    Imports users' modules into this process.
    """
    warnings_of(run_checks(USERS_PARTS, RunContext(config)), sources)


def check_folders(context: RunContext) -> Iterator[Problem]:
    """The folders in which users' modules are looked for."""
    for folder in context.config.extensions.path or ():
        if not Path(folder).is_dir():
            yield Problem("extensions.path", "no such folder", "give folders that hold your modules", folder)


def check_parts(context: RunContext) -> Iterator[Problem]:
    """Each part that the configuration names, by the check of its key. Imports what it needs; makes nothing."""
    activate(context.config.extensions.path or ())
    for key, part in named_extensions(context.config):
        yield from _check_part(PartContext(key, part, context.config))


def _check_part(context: PartContext) -> list[Problem]:
    key = context.key
    checks = [check for prefix, check in CHECK_BY_KEY.items() if key == prefix or key.startswith(f"{prefix}.")]
    try:
        json.dumps(context.part.arguments)
        return run_checks(checks, context)
    except ExtensionError as error:
        return [*context.problems(str(error).removeprefix(f"{context.part.name}: "))]
    except TypeError as error:
        return [*context.problems(f"its arguments cannot be handed to another process: {error}")]


def _reward(context: PartContext) -> Iterator[Problem]:
    from ctpo_megatron.rewards import WORDS, reward_problem

    part = context.part
    if not part.is_path:
        return context.unknown(WORDS)
    return context.problems(reward_problem(load(part.name), part.arguments))


def _objective(context: PartContext) -> Iterator[Problem]:
    if not context.part.is_path:
        return context.unknown(())
    from ctpo_megatron.objective import objective_problem

    return context.problems(objective_problem(load(context.part.name), context.part.arguments))


def _tracker(context: PartContext) -> Iterator[Problem]:
    from ctpo_megatron.tracking import tracker_problem

    return context.problems(tracker_problem(context.part))


def _family(context: PartContext) -> Iterator[Problem]:
    try:
        load_family(context.part, context.config.extensions.path or ())
    except ConfigError as error:
        yield from context.problems("; ".join(problem.message for problem in error.problems))


def _filter(context: PartContext) -> Iterator[Problem]:
    from ctpo_megatron.rollouts import filter_problem

    return context.problems(filter_problem(context.part))


def _sampler(context: PartContext) -> Iterator[Problem]:
    from ctpo_megatron.data import sampler_problem

    data = context.config.data
    weights = "chooses the prompts itself; take the weights out of data.train" if data.train_weights else ""
    order = "" if data.shuffle else "chooses the prompts itself; remove data.shuffle"
    return context.problems(sampler_problem(context.part), weights, order)


def _tool_parser(context: PartContext) -> Iterator[Problem]:
    check_tool_parser(context.part)  # raises ExtensionError
    check_parser_fits(context.config.rollout)
    return context.problems()


def _raised_by(check: Callable[[Extension], None]) -> Check[PartContext]:
    """A check that raises ExtensionError, as one that finds problems."""

    def found(context: PartContext) -> Iterator[Problem]:
        check(context.part)
        return context.problems()

    return found


CHECK_BY_KEY: dict[str, Check[PartContext]] = {
    "data.sampler": _sampler,
    "model.family": _family,
    "objective.function": _objective,
    "reward.function": _reward,
    "reward.by_source": _reward,
    "rollout.filters": _filter,
    "rollout.tools": _raised_by(check_tool),
    "rollout.tool_parser": _tool_parser,
    "rollout.endpoint.agent": _raised_by(check_agent),
    "rollout.environment": _raised_by(check_environment),
    "tracking.trackers": _tracker,
}
"""Key of the configuration (with all keys below it) -> the check of what it names."""

USERS_PARTS: tuple[Check[RunContext], ...] = (check_folders, check_parts)
