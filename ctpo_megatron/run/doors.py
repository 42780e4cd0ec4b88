"""What may stand at each key of a configuration that names a part, and how a part is checked before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ctpo_megatron.base.extensions import load
from ctpo_megatron.config import Config, Extension

Check = Callable[[Extension, Config], str]
"""Why this part cannot be used, or "". Imports what it needs; makes nothing."""


def check_of(key: str) -> Check | None:
    """The check of the door at `key`, or at a key above it; None where there is no door."""
    return next((check for door, check in DOORS.items() if key == door or key.startswith(f"{door}.")), None)


def _reward(part: Extension, _config: Config) -> str:
    from ctpo_megatron.rewards import WORDS, reward_problem

    if not part.is_path:
        return _unknown(part, WORDS)
    return reward_problem(load(part.name), part.arguments)


def _objective(part: Extension, _config: Config) -> str:
    if not part.is_path:
        return _unknown(part, ())
    from ctpo_megatron.objective import check_objective

    return "; ".join(check_objective(load(part.name), part.arguments))


def _tracker(part: Extension, config: Config) -> str:
    from ctpo_megatron.tracking import tracker_problem

    return tracker_problem(part, config.tracking.python) or ""


def _family(part: Extension, config: Config) -> str:
    from ctpo_megatron.config import ConfigError, load_family

    try:
        load_family(part, config.extensions.path or ())
    except ConfigError as error:
        return "; ".join(problem.message for problem in error.problems)
    return ""


def _filter(part: Extension, _config: Config) -> str:
    from ctpo_megatron.rollouts import filter_problem

    return filter_problem(part)


def _rollout(name: str) -> Check:
    def check(part: Extension, _config: Config) -> str:
        from ctpo_megatron.environments import factory

        getattr(factory, name)(part)  # raises ExtensionError, which the caller words
        return ""

    return check


def _tool_parser(part: Extension, config: Config) -> str:
    from ctpo_megatron.environments import factory

    factory.check_tool_parser(part)
    factory.check_parser_fits(config.rollout)
    return ""


def _unknown(part: Extension, words: Iterable[str]) -> str:
    known = list(words)
    return "" if part.name in known else f"no such part; write {' or '.join([*known, 'package.module:Name'])}"


DOORS: dict[str, Check] = {
    "model.family": _family,
    "objective.function": _objective,
    "reward.function": _reward,
    "reward.by_source": _reward,
    "rollout.filters": _filter,
    "rollout.tools": _rollout("check_tool"),
    "rollout.tool_parser": _tool_parser,
    "rollout.environment": _rollout("check_environment"),
    "tracking.trackers": _tracker,
}
"""Key of the configuration (with all keys below it) -> the check of what it names."""
