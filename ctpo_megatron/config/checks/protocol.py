"""Checks of how the model is told to call tools: chat template, parser, tools, system prompt."""

from __future__ import annotations

from collections.abc import Iterator

from ctpo_megatron.config.chat_template import chat_template_names, chat_template_text
from ctpo_megatron.config.problems import Problem, error
from ctpo_megatron.config.schema import Config
from ctpo_megatron.config.system_prompt import system_prompt_text


def check_protocol(config: Config) -> Iterator[Problem]:
    """The protocol `fenced` has one tool and no schemas; chat template and system prompt can be read."""
    if config.model.chat_template is not None:
        yield from _chat_template(config, config.model.chat_template)
    if config.rollout.tool_parser.name == "fenced":
        yield from _fenced(config)
    yield from _tool_budget(config)
    if config.data.system_prompt is not None:
        yield from _system_prompt(config, config.data.system_prompt)


def _chat_template(config: Config, value: str) -> Iterator[Problem]:
    try:
        chat_template_text(value)
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or "is not UTF-8"
        fix = f"write {', '.join(chat_template_names())}, or the path of a file that ends in .jinja"
        yield error(config, "model.chat_template", f"cannot be read: {reason}", fix)


def _fenced(config: Config) -> Iterator[Problem]:
    key, tools = "rollout.tool_parser", config.rollout.tools
    if len(tools) != 1:
        named = ", ".join(map(str, tools)) or "none"
        message = f"runs programs with one tool, and rollout.tools has {len(tools)} ({named}): a block names no tool"
        yield Problem(key, message, "set rollout.tools: [python], or rollout.tool_parser: hermes", "fenced")
    if config.data.tool_in_prompt:
        message = "shows the model a way to call tools that rollout.tool_parser: fenced does not read"
        yield error(config, "data.tool_in_prompt", message, "leave it out, or set rollout.tool_parser: hermes")


def _tool_budget(config: Config) -> Iterator[Problem]:
    for name in ("max_tool_calls", "max_tool_s"):
        if getattr(config.rollout, name) is not None and not config.rollout.tools:
            yield error(
                config, f"rollout.{name}", "limits calls, and rollout.tools is empty", "set null, or give tools"
            )


def _system_prompt(config: Config, value: str) -> Iterator[Problem]:
    try:
        system_prompt_text(value)
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or "is not UTF-8"
        message = f"is the name of a file that cannot be read: {reason}"
        yield error(config, "data.system_prompt", message, "give a file's path, or the text itself")
