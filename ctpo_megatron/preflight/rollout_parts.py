"""Checks of a run's tools, their parser, its environment and its agent, without creating any."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ctpo_megatron.base.extensions import ExtensionError, call_problem, load
from ctpo_megatron.config import Extension, RolloutConfig
from ctpo_megatron.environments import FencedParser, implementation, tool_schema, tool_schemas


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
    found = load(agent.name)
    if not isinstance(found, type):
        problem = "is not callable" if not callable(found) else call_problem(found, ("task",), agent.arguments)
    elif not any("__call__" in vars(base) for base in found.__mro__):
        problem = "has no method __call__"
    else:
        problem = call_problem(found, (), agent.arguments) or call_problem(found.__call__, ("self", "task"), {})
    if problem:
        raise ExtensionError(f"{agent}: {problem}")


def _check_methods(made_by: Any, part: Extension, methods: Sequence[str], *, awaited: bool) -> None:
    """Check that `made_by(**arguments)` is possible; for a class also its methods, each with one argument."""
    _check_binds(str(part), made_by, **part.arguments)
    if not isinstance(made_by, type):
        return
    functions = dict(inspect.getmembers(made_by, inspect.isfunction))
    for name in methods:
        if name not in functions:
            raise ExtensionError(f"{part}: has no method {name}")
        if awaited and not inspect.iscoroutinefunction(functions[name]):
            raise ExtensionError(f"{part}: {name} must be an `async def`")
        _check_binds(f"{part}: {name}", functions[name], None, None)


def _check_binds(what: str, function: Callable[..., Any], *positional: None, **arguments: Any) -> None:
    try:
        inspect.signature(function).bind(*positional, **arguments)
    except (TypeError, ValueError) as error:
        raise ExtensionError(f"{what}: cannot be called with its arguments: {error}") from error
