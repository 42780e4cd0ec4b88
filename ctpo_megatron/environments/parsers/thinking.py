"""Separates a model's thinking from the rest of its turn."""

from __future__ import annotations

OPEN, THINK_CLOSE = "<think>", "</think>"
"""The tags around a model's thinking."""


def left_open(context: str) -> str:
    """The `<think>` tag that a prompt ends with; "" without one."""
    return OPEN if context.rstrip().endswith(OPEN) else ""


def without_thinking(text: str) -> str:
    """The part of a model turn that is parsed for tool calls: all but thinking at its beginning.

    Unfinished thinking is the whole turn.
    """
    return text.partition(THINK_CLOSE)[2] if text.lstrip().startswith(OPEN) else text
