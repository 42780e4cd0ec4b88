"""Users' extensions: what each key that names one may hold, and how it is checked before a run. Nothing is created."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ctpo_megatron.base.extensions import ExtensionError, activate, call_problem, load, use_problem
from ctpo_megatron.config import (
    Config,
    ConfigError,
    Extension,
    Problem,
    RolloutConfig,
    Sources,
    accepted,
    load_family,
    named_extensions,
)
from ctpo_megatron.environments import FencedParser, implementation, tool_schema, tool_schemas


def check_extensions(config: Config, sources: Sources | None = None) -> None:
    """Raises ConfigError with `extension_problems`, and where they are."""
    accepted(extension_problems(config) if sources is None else map(sources.placed, extension_problems(config)))


def extension_problems(config: Config) -> list[Problem]:
    """Return all that is wrong with the extensions that the configuration names.

    Imports users' modules into this process.
    """
    problems = [
        Problem("extensions.path", "no such folder", "give folders that hold your modules", folder)
        for folder in config.extensions.path or ()
        if not Path(folder).is_dir()
    ]
    activate(config.extensions.path or ())
    for key, part in named_extensions(config):
        problems += _check_part(key, part, config)
    return problems


PartCheck = Callable[[Extension, Config], str | None]
"""Why a part cannot be used; None or "" if it can. It may raise ExtensionError with the reason."""


def _check_part(key: str, part: Extension, config: Config) -> list[Problem]:
    checks = [check for prefix, check in CHECK_BY_KEY.items() if key == prefix or key.startswith(f"{prefix}.")]
    messages: list[str | None]
    try:
        json.dumps(part.arguments)
        messages = [check(part, config) for check in checks]
    except ExtensionError as error:
        messages = [str(error).removeprefix(f"{part.name}: ")]
    except TypeError as error:
        messages = [f"its arguments cannot be handed to another process: {error}"]
    return [Problem(key, message, value=part.name) for message in messages if message]


def _unknown(words: Iterable[str]) -> str:
    return f"no such part; write {' or '.join([*words, 'package.module:Name'])}"


def _reward(part: Extension, _config: Config) -> str | None:
    from ctpo_megatron.rewards import WORDS, reward_problem

    if part.is_path:
        return reward_problem(load(part.name), part.arguments)
    return None if part.name in WORDS else _unknown(WORDS)


def _objective(part: Extension, _config: Config) -> str | None:
    if not part.is_path:
        return _unknown(())
    from ctpo_megatron.objective import objective_problem

    return objective_problem(load(part.name), part.arguments)


def _tracker(part: Extension, _config: Config) -> str | None:
    from ctpo_megatron.tracking import tracker_problem

    return tracker_problem(part)


def _family(part: Extension, config: Config) -> str | None:
    try:
        load_family(part, config.extensions.path or ())
    except ConfigError as error:
        return "; ".join(problem.message for problem in error.problems)
    return None


def _filter(part: Extension, _config: Config) -> str | None:
    from ctpo_megatron.rollouts import filter_problem

    return filter_problem(part)


def _sampler(part: Extension, config: Config) -> str | None:
    from ctpo_megatron.data import sampler_problem

    if config.data.train_weights:
        return "chooses the prompts itself; take the weights out of data.train"
    if not config.data.shuffle:
        return "chooses the prompts itself; remove data.shuffle"
    return sampler_problem(part)


def _tool_parser(part: Extension, config: Config) -> None:
    check_tool_parser(part)
    check_parser_fits(config.rollout)


def _without_config(check: Callable[[Extension], None]) -> PartCheck:
    """A check that needs nothing but the part, and raises."""

    def checked(part: Extension, _config: Config) -> None:
        check(part)

    return checked


def check_tool(tool: Extension) -> None:
    """Raises ExtensionError when `tool` cannot be a tool: no schema, no async call, or it does not take its arguments.

    The check imports the user's module but creates nothing.
    """
    if tool.name == "python":
        if tool.arguments:
            raise ExtensionError("python: takes no arguments; its settings are in the section `sandbox`")
        return
    tool_schema(tool)
    _check_methods(implementation("tool", tool), tool, ("__call__",), awaited=True)


def check_tool_parser(parser: Extension) -> None:
    """Raises ExtensionError when `parser` cannot be a ToolParser, or has `stop` but no `ends_turn`."""
    made_by = implementation("tool_parser", parser)
    methods = ("mentions_call", "parse", "render", *(["ends_turn"] if hasattr(made_by, "stop") else []))
    _check_methods(made_by, parser, methods, awaited=False)


def check_parser_fits(rollout: RolloutConfig) -> None:
    """Raises ExtensionError when the parser `fenced` has no tool that runs programs."""
    if rollout.tool_parser.name != "fenced":
        return
    for schema in tool_schemas(rollout):
        name, arguments = schema["function"]["name"], schema["function"].get("parameters", {}).get("properties", {})
        if name != (tool := FencedParser.tool) or "code" not in arguments:
            raise ExtensionError(f"fenced: runs programs with a tool {tool!r} that takes `code`; the tool is {name!r}")


def check_environment(environment: Extension) -> None:
    """Raises ExtensionError when `environment` cannot be an Environment."""
    if environment.name == "endpoint":
        if environment.arguments:
            raise ExtensionError("endpoint: takes no arguments; its settings are in the section `rollout.endpoint`")
        return
    _check_methods(implementation("environment", environment), environment, ("run",), awaited=True)


def check_agent(agent: Extension) -> None:
    """Raises ExtensionError when `agent` cannot be a function of one task, or a class of such."""
    if not agent.is_path:
        raise ExtensionError(f"{agent}: no such part; write package.module:name")
    if problem := use_problem(load(agent.name), ("task",), agent.arguments):
        raise ExtensionError(f"{agent}: {problem}")


def _check_methods(made_by: Any, part: Extension, methods: Sequence[str], *, awaited: bool) -> None:
    """Check that `made_by(**arguments)` is possible; for a class also its methods, each with one argument."""
    if problem := call_problem(made_by, (), part.arguments):
        raise ExtensionError(f"{part}: {problem}")
    if not isinstance(made_by, type):
        return
    functions = dict(inspect.getmembers(made_by, inspect.isfunction))
    for name in methods:
        if name not in functions:
            raise ExtensionError(f"{part}: has no method {name}")
        if awaited and not inspect.iscoroutinefunction(functions[name]):
            raise ExtensionError(f"{part}: {name} must be an `async def`")
        if problem := call_problem(functions[name], ("self", "argument"), {}):
            raise ExtensionError(f"{part}: {name} {problem}")


CHECK_BY_KEY: dict[str, PartCheck] = {
    "data.sampler": _sampler,
    "model.family": _family,
    "objective.function": _objective,
    "reward.function": _reward,
    "reward.by_source": _reward,
    "rollout.filters": _filter,
    "rollout.tools": _without_config(check_tool),
    "rollout.tool_parser": _tool_parser,
    "rollout.endpoint.agent": _without_config(check_agent),
    "rollout.environment": _without_config(check_environment),
    "tracking.trackers": _tracker,
}
"""Key of the configuration (with all keys below it) -> the check of what it names."""
