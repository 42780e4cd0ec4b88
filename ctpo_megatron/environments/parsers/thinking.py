"""Separates a model's thinking from the rest of its turn."""

from __future__ import annotations

from ctpo_megatron.base.chat_template import CLOSE, OPEN


def left_open(context: str) -> str:
    """The `<think>` tag that a prompt ends with; "" without one."""
    return OPEN if context.rstrip().endswith(OPEN) else ""


def without_thinking(text: str) -> str:
    """The part of a model turn that is parsed for tool calls: all but thinking at its beginning.

    Unfinished thinking is the whole turn.
    """
    return text.partition(CLOSE)[2] if text.lstrip().startswith(OPEN) else text
