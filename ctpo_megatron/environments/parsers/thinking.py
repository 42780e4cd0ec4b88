"""What a model says apart from its thinking."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def left_open(context: str) -> str:
    """The tag that a text ends with, as prompts do that make the model think; "" without one."""
    return OPEN if context.rstrip().endswith(OPEN) else ""


def without_thinking(text: str) -> str:
    """The part of a model turn that is read for tool calls: all but thinking at its beginning.

    Thinking that was not ended is the whole turn.
    """
    return text.partition(CLOSE)[2] if text.lstrip().startswith(OPEN) else text
