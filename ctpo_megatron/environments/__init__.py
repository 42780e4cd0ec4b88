"""Environments: the episode of a prompt, with model turns, tool calls, messages and budgets. No vLLM, no Ray.

- `Environment`, `Tool`, `ToolParser`, `StoppingParser`: what users can implement (`protocol`), with `Message`,
  `ToolCallRequest`, `ToolResult`, `ParseError` and `ToolUnavailable`.
- `ToolEnvironment`, `EndpointEnvironment`, `PythonTool`, `HermesParser`, `FencedParser`: ours; `AgentTask`: an agent's.
- `Episode`, `play`: one episode, within `EpisodeLimits`, of an engine that answers with a `ModelTurn`.
- `make_environment`, `make_toolbox`, `make_parser`, `episode_limits`: from section `rollout`.
- `MessageTemplate`, `read_tokenizer`: messages as tokens, token in and token out.
- `training_prompts`, `held_out_prompts`: the prompts of a run.
- `trajectory_seed`, `turn_seed`: seeds of what is sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctpo_megatron.base.front_door import import_when_used
from ctpo_megatron.environments.episode import (
    Episode,
    EpisodeLimits,
    EpisodeOver,
    ModelTurn,
    Sampling,
    Turn,
    play,
    trajectory_seed,
    turn_seed,
)
from ctpo_megatron.environments.factory import (
    episode_limits,
    implementation,
    make_environment,
    make_parser,
    make_toolbox,
    names_a_server,
    node_sandbox_url,
    offered_schemas,
    open_sandbox,
    system_prompt,
    tool_schema,
    tool_schemas,
)
from ctpo_megatron.environments.multi_turn import ToolEnvironment
from ctpo_megatron.environments.parsers.fenced import FencedParser
from ctpo_megatron.environments.parsers.hermes import HermesParser
from ctpo_megatron.environments.protocol import (
    THINK_CLOSE,
    Environment,
    Message,
    ParseError,
    Schema,
    StoppingParser,
    Tool,
    ToolCallRequest,
    ToolParser,
    ToolResult,
    ToolUnavailable,
    left_open,
)
from ctpo_megatron.environments.python_tool import PythonTool
from ctpo_megatron.environments.template import MessageTemplate, end_tokens, stop_token_ids
from ctpo_megatron.environments.tokenizer import (
    TokenizerError,
    check_chat_template,
    decoder,
    different_ids,
    exported_chat_template,
    read_tokenizer,
    template_problem,
    use_chat_template,
)
from ctpo_megatron.environments.toolbox import Toolbox, example_call

if TYPE_CHECKING:  # the first loads an HTTP server, the second rewards and the files of prompts
    from ctpo_megatron.environments.endpoint import AgentTask, EndpointEnvironment
    from ctpo_megatron.environments.prompts import (
        chat_tokenizer,
        held_out_prompts,
        log_left_out,
        training_prompts,
        usable,
        write_record,
    )

__all__ = [
    "AgentTask",
    "Environment",
    "Episode",
    "FencedParser",
    "HermesParser",
    "Message",
    "ParseError",
    "PythonTool",
    "Schema",
    "StoppingParser",
    "Tool",
    "ToolCallRequest",
    "ToolEnvironment",
    "ToolParser",
    "ToolResult",
    "ToolUnavailable",
]
"""What users' parts import."""

__getattr__ = import_when_used(__name__)
