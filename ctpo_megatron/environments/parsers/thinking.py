"""What a model says apart from its thinking."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def without_thinking(text: str) -> str:
    """The part of a model turn that is read for tool calls: all but thinking at its beginning.

    Thinking that was not ended is the whole turn. Where the prompt has opened it, nothing in the turn tells that: it is
    read as the rest is.
    """
    return text.partition(CLOSE)[2] if text.lstrip().startswith(OPEN) else text
