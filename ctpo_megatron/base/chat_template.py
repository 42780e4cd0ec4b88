"""Applies chat templates, which are programs of the people who made a model: in jinja2's sandbox, with a deadline."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

OPEN, CLOSE = "<think>", "</think>"
"""The tags around a model's thinking."""
RENDER_S = 10.0
"""For a template to render one conversation; an ordinary one takes a millisecond."""
EACH_S = 0.05
"""For each further conversation of the same call."""


class TemplateTimeout(ValueError):
    """A chat template did not end in time; the message says what to do."""


class _Late(BaseException):
    """Raised where the template is: no handler of an Exception takes it."""


def apply_chat_template(tokenizer: Any, conversations: Sequence[Any], **options: Any) -> Any:
    """The text of a conversation, or the texts of several: see `apply_chat_template` of transformers' tokenizers.

    Raises TemplateTimeout, jinja2's TemplateError, and what a template raises.
    """
    several = len(conversations) if conversations and isinstance(conversations[0], Sequence) else 1
    limit_s = RENDER_S + EACH_S * (several - 1)
    try:
        with _ended_after(limit_s):
            return tokenizer.apply_chat_template(conversations, tokenize=False, **options)
    except _Late:
        raise TemplateTimeout(
            f"the chat template has not ended after {limit_s:g} s, does it loop? Take the chat_template.jinja that the "
            "model came with, or set model.chat_template to one of ours"
        ) from None


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise _Late in this thread, whichever it is, between two instructions of Python after this time."""
    thread, lock, over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), threading.Event()
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def end() -> None:
        if not over.wait(seconds):
            with lock:
                if not over.is_set():
                    raise_in(thread, ctypes.py_object(_Late))

    threading.Thread(target=end, name="chat template", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            over.set()
        raise_in(thread, None)  # one that was raised, and has not arrived yet
