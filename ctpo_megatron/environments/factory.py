"""Creates the tools, parser, environment and limits of section `rollout`, or checks parts without creating them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from ctpo_megatron.base.extensions import ExtensionError, call_problem, called, load
from ctpo_megatron.config import DataConfig, Extension, RolloutConfig, SandboxConfig, SystemPrompt, system_prompt_text
from ctpo_megatron.environments.episode import EpisodeLimits
from ctpo_megatron.environments.multi_turn import ToolEnvironment
from ctpo_megatron.environments.node_sandbox import node_sandbox_url
from ctpo_megatron.environments.parsers.fenced import TOOL, FencedParser
from ctpo_megatron.environments.parsers.hermes import HermesParser
from ctpo_megatron.environments.protocol import Environment, Schema, Tool, ToolParser
from ctpo_megatron.environments.python_tool import PythonTool
from ctpo_megatron.environments.toolbox import Toolbox

TOOLS: dict[str, Any] = {"python": PythonTool}
PARSERS: dict[str, Any] = {"hermes": HermesParser, "fenced": FencedParser}
ENVIRONMENTS: dict[str, Any] = {"tools": ToolEnvironment, "endpoint": None}
"""`endpoint` is made from a section of its own."""


def episode_limits(rollout: RolloutConfig, data: DataConfig) -> EpisodeLimits:
    """The budgets of every episode of a run."""
    return EpisodeLimits(
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        max_response_tokens=rollout.max_response_tokens,
        max_model_len=rollout.engine.max_model_len,
        max_tool_calls=rollout.max_tool_calls,
        max_tool_s=rollout.max_tool_s,
        max_prompt_tokens=data.max_prompt_tokens,
    )


def make_toolbox(
    rollout: RolloutConfig, sandbox: SandboxConfig, sandbox_url: str | None, *, engines: int, nodes: int
) -> Toolbox:
    """The tools and the parser of a run; `extensions.activate` comes first. Raises ExtensionError.

    sandbox_url: None uses this node's own sandbox; LookupError when there is none. engines: of all `nodes`.
    """
    url = node_sandbox_url() if sandbox_url is None else sandbox_url
    tools: list[Tool] = [
        PythonTool(sandbox, url, engines, nodes) if tool.name == "python" else _made(TOOLS, tool)
        for tool in rollout.tools
    ]
    return Toolbox(tools, make_parser(rollout), rollout.max_observation_chars)


def make_parser(rollout: RolloutConfig) -> ToolParser:
    """The parser of a run. Raises ExtensionError."""
    parser: ToolParser = _made(PARSERS, rollout.tool_parser)
    return parser


def make_environment(rollout: RolloutConfig, data: DataConfig) -> Environment:
    """The environment of a run. Raises ExtensionError."""
    if rollout.environment.name == "endpoint":
        from ctpo_megatron.environments.endpoint import EndpointEnvironment  # it loads an HTTP server

        return EndpointEnvironment(rollout.endpoint, offered_schemas(data, rollout))
    environment: Environment = _made(ENVIRONMENTS, rollout.environment)
    return environment


def needs_sandbox(rollout: RolloutConfig) -> bool:
    """Whether a configured tool runs programs in the sandbox."""
    return any(tool.name == "python" for tool in rollout.tools)


def tool_schemas(rollout: RolloutConfig) -> list[Schema]:
    """The function schemas of the configured tools, in their order, without creating a tool. Raises ExtensionError."""
    return [_schema(tool) for tool in rollout.tools]


def offered_schemas(data: DataConfig, rollout: RolloutConfig) -> list[Schema]:
    """The schemas that prompts show the model, see `data.tool_in_prompt` and `ToolParser`. Raises ExtensionError."""
    offer = data.tool_in_prompt
    if offer is None:
        offer = bool(getattr(make_parser(rollout), "schemas_in_prompt", True))
    return tool_schemas(rollout) if offer else []


def system_prompt(data: DataConfig, rollout: RolloutConfig) -> SystemPrompt:
    """The system prompt of every conversation, from `data.system_prompt` or the parser. Raises ExtensionError."""
    if data.system_prompt is not None:
        return SystemPrompt(system_prompt_text(data.system_prompt), chosen=True)
    return SystemPrompt(str(getattr(make_parser(rollout), "system_prompt", "")))


def check_tool(tool: Extension) -> None:
    """Raises ExtensionError when `tool` cannot be a tool: no schema, no async call, or it does not take its arguments.

    The check imports the user's module but creates nothing.
    """
    if tool.name == "python":
        if tool.arguments:
            raise ExtensionError("python: takes no arguments; its settings are in the section `sandbox`")
        return
    _schema(tool)
    _check_methods(_find(TOOLS, tool), tool, ("__call__",), awaited=True)


def check_tool_parser(parser: Extension) -> None:
    """Raises ExtensionError when `parser` cannot be a ToolParser, or has `stop` but no `ends_turn`."""
    made_by = _find(PARSERS, parser)
    methods = ("mentions_call", "parse", "render", *(["ends_turn"] if hasattr(made_by, "stop") else []))
    _check_methods(made_by, parser, methods, awaited=False)


def check_parser_fits(rollout: RolloutConfig) -> None:
    """Raises ExtensionError when the parser `fenced` has no tool that runs programs."""
    if rollout.tool_parser.name != "fenced":
        return
    for schema in tool_schemas(rollout):
        name, arguments = schema["function"]["name"], schema["function"].get("parameters", {}).get("properties", {})
        if name != TOOL or "code" not in arguments:
            raise ExtensionError(f"fenced: runs programs with a tool {TOOL!r} that takes `code`; the tool is {name!r}")


def check_environment(environment: Extension) -> None:
    """Raises ExtensionError when `environment` cannot be an Environment."""
    if environment.name == "endpoint":
        if environment.arguments:
            raise ExtensionError("endpoint: takes no arguments; its settings are in the section `rollout.endpoint`")
        return
    _check_methods(_find(ENVIRONMENTS, environment), environment, ("run",), awaited=True)


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


def _made(words: dict[str, Any], part: Extension) -> Any:
    found = _find(words, part)
    with called(part.name):
        return found(**part.arguments)


def _find(words: dict[str, Any], part: Extension) -> Any:
    if part.is_path:
        return load(part.name)
    if part.name not in words:
        raise ExtensionError(f"{part}: write {' or '.join(words)}, or package.module:Name")
    return words[part.name]


def _schema(tool: Extension) -> Schema:
    schema = getattr(_find(TOOLS, tool), "schema", None)
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ExtensionError(
            f'{tool}: needs the class attribute `schema`, an OpenAI function schema: {{"type": "function", '
            '"function": {"name": ..., "description": ..., "parameters": ...}}'
        )
    return cast(Schema, schema)


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
