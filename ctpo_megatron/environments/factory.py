"""Creates the tools, parser, environment and limits of section `rollout`, and opens the sandbox that tools need.

A run starts the sandbox, the user names one, or each node has its own, whose program names it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

from ctpo_megatron.base.extensions import ExtensionError, called, load
from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.config import DataConfig, Extension, RolloutConfig, SandboxConfig, SystemPrompt, system_prompt_text
from ctpo_megatron.environments.episode import EpisodeLimits
from ctpo_megatron.environments.multi_turn import ToolEnvironment
from ctpo_megatron.environments.parsers.fenced import FencedParser
from ctpo_megatron.environments.parsers.hermes import HermesParser
from ctpo_megatron.environments.protocol import Environment, Schema, Tool, ToolParser
from ctpo_megatron.environments.python_tool import PythonTool
from ctpo_megatron.environments.toolbox import Toolbox
from ctpo_sandbox.variables import node_url

_Kind = Literal["tool", "tool_parser", "environment"]
_OURS: dict[_Kind, dict[str, Any]] = {
    "tool": {"python": PythonTool},
    "tool_parser": {"hermes": HermesParser, "fenced": FencedParser},
    "environment": {"tools": ToolEnvironment, "endpoint": None},  # which is made from a section of its own
}
"""Words of a configuration -> the part that each names."""


def episode_limits(rollout: RolloutConfig, data: DataConfig) -> EpisodeLimits:
    """Return the budgets of every episode of a run."""
    return EpisodeLimits(
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        max_response_tokens=rollout.max_response_tokens,
        max_model_len=rollout.engine.max_model_len,
        max_tool_calls=rollout.max_tool_calls,
        max_tool_s=rollout.max_tool_s,
        max_prompt_tokens=data.max_prompt_tokens,
        stop=rollout.stop,
    )


def make_toolbox(
    rollout: RolloutConfig, sandbox: SandboxConfig, sandbox_url: str | None, *, engines: int, nodes: int
) -> Toolbox:
    """Return the tools and the parser of a run; `extensions.activate` comes first. Raises ExtensionError.

    sandbox_url: None uses this node's own sandbox; LookupError when there is none. engines: of all `nodes`.
    """
    url = node_sandbox_url() if sandbox_url is None else sandbox_url
    tools: list[Tool] = [
        PythonTool(sandbox, url, engines, nodes) if tool.name == "python" else _made("tool", tool)
        for tool in rollout.tools
    ]
    return Toolbox(tools, make_parser(rollout), rollout.max_observation_chars)


def make_parser(rollout: RolloutConfig) -> ToolParser:
    """Return the parser of a run. Raises ExtensionError."""
    parser: ToolParser = _made("tool_parser", rollout.tool_parser)
    return parser


def make_environment(rollout: RolloutConfig, data: DataConfig) -> Environment:
    """Return the environment of a run. Raises ExtensionError."""
    if rollout.environment.name == "endpoint":
        from ctpo_megatron.environments.endpoint import EndpointEnvironment  # it loads an HTTP server

        return EndpointEnvironment(rollout.endpoint, offered_schemas(data, rollout))
    environment: Environment = _made("environment", rollout.environment)
    return environment


def names_a_server() -> bool:
    """Return whether this process knows the address of a sandbox on its node."""
    return any(os.environ.get(name) for name in ("CTPO_SANDBOX_URL", "CTPO_SANDBOX_URL_FILE"))


def node_sandbox_url() -> str:
    """Address of this node's sandbox. Raises LookupError with advice when there is none, ValueError as `node_url`."""
    if not (url := node_url()):
        raise LookupError(
            "this node has no sandbox: CTPO_SANDBOX_URL is not set for its Ray processes. Start the node with "
            "`python -m ctpo_launchers.node`, or set sandbox.url"
        )
    return url


@contextmanager
def open_sandbox(sandbox: SandboxConfig, nodes: int, logs: Path) -> Iterator[str | None]:
    """Yield the URL of the sandbox of all engines, or None if every node has its own; a server of ours ends after.

    logs: folder for its output. Raises SandboxStartError.
    """
    if sandbox.url is not None or names_a_server() or nodes > 1:
        yield sandbox.url
    else:
        from ctpo_sandbox import start_configured_server

        with start_configured_server(sandbox, LogPaths(logs).sandbox) as server:
            yield server.url


def tool_schemas(rollout: RolloutConfig) -> list[Schema]:
    """Return the function schemas of the configured tools, in their order, without creating a tool. Raises
    ExtensionError.
    """
    return [tool_schema(tool) for tool in rollout.tools]


def offered_schemas(data: DataConfig, rollout: RolloutConfig) -> list[Schema]:
    """Return the schemas that prompts show the model, see `data.tool_in_prompt` and `ToolParser`. Raises
    ExtensionError.
    """
    offer = data.tool_in_prompt
    if offer is None:
        offer = bool(getattr(make_parser(rollout), "schemas_in_prompt", True))
    return tool_schemas(rollout) if offer else []


def system_prompt(data: DataConfig, rollout: RolloutConfig) -> SystemPrompt:
    """Return the system prompt of every conversation, from `data.system_prompt` or the parser. Raises
    ExtensionError.
    """
    if data.system_prompt is not None:
        return SystemPrompt(system_prompt_text(data.system_prompt), chosen=True)
    return SystemPrompt(str(getattr(make_parser(rollout), "system_prompt", "")))


def tool_schema(tool: Extension) -> Schema:
    """Return the function schema of a tool, without creating it. Raises ExtensionError when it has none."""
    schema = getattr(implementation("tool", tool), "schema", None)
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ExtensionError(
            f'{tool}: needs the class attribute `schema`, an OpenAI function schema: {{"type": "function", '
            '"function": {"name": ..., "description": ..., "parameters": ...}}'
        )
    return cast(Schema, schema)


def implementation(kind: _Kind, part: Extension) -> Any:
    """Return the class or function that a part names, which is not created. Raises ExtensionError when there is
    none.
    """
    if part.is_path:
        return load(part.name)
    if part.name not in _OURS[kind]:
        raise ExtensionError(f"{part}: write {' or '.join(_OURS[kind])}, or package.module:Name")
    return _OURS[kind][part.name]


def _made(kind: _Kind, part: Extension) -> Any:
    found = implementation(kind, part)
    with called(part.name):
        return found(**part.arguments)
