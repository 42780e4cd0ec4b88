"""Conversations as a chat template renders them, and as tokens: a special token in contents or tools stays text.

They are `marked` before the template, which is a program of the people who made a model, writes around them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ctpo_megatron.data.messages import ChatMessage

_MARK = secrets.token_hex(12)
"""Stands before every special token of a content until the content is tokenized: letters and digits, which templates
leave as they are. It is drawn at random, so no content holds it."""

_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that add nothing to what their backend makes of a text, but half of the time."""

_AT_ONCE = 1000
"""Texts encoded by one call: an encoding takes a hundred bytes a token until its ids are taken out."""

_T = TypeVar("_T")
Offered = list[dict[str, Any]] | None
"""Tool schemas as a chat template receives them."""


def special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches the text of any special token of a tokenizer; None: it has none."""
    return _patterns(tokenizer, len(tokenizer), tuple(map(str, tokenizer.all_special_tokens)))[0]


def marked(tokenizer: Any, content: _T) -> _T:
    """Return a text, or all texts of lists and objects, keys included, with a mark before each special token.

    A conversation or a text that was rendered from them becomes tokens with `token_ids`, and is shown with `unmarked`.
    """
    special = special_tokens(tokenizer)
    return content if special is None else _marked(special, content)


def marked_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a chat template, `marked` but for their roles."""
    return [{**marked(tokenizer, dict(message)), "role": message["role"]} for message in messages]


def unmarked(text: str) -> str:
    """Return a rendered text without marks."""
    return text.replace(_MARK, "")


def rfind_token(text: str, token: str, start: int) -> int:
    """Return where the template last wrote a token in a rendered text, not before `start`; -1: nowhere."""
    at = text.rfind(token, start)
    while at >= 0 and text.endswith(_MARK, 0, at):
        at = text.rfind(token, start, at)
    return at


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered texts, without special tokens around them.

    Special tokens that the template wrote are parsed; those that are `marked` become the tokens of plain text.
    """
    if not texts:
        return []
    if len(texts) == 1 and _MARK not in texts[0] and type(tokenizer).__name__ in _PLAIN:
        tokenizer.backend_tokenizer.encode_special_tokens = tokenizer.split_special_tokens
        return [tokenizer.backend_tokenizer.encode(texts[0], add_special_tokens=False).ids]
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    for index, text in enumerate(texts):
        if _MARK in text:
            ids[index] = _apart(tokenizer, text)
    return ids


def render(
    conversations: Sequence[Sequence[ChatMessage]],
    tools: Sequence[Offered],
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
) -> tuple[list[str], dict[int, str]]:
    """Return the text of every conversation, and why the chat template refuses some of them, by index.

    Special tokens in contents are marked: `encode` takes them for text, and `unmarked` shows them.
    """
    import jinja2

    texts, refused = [""] * len(conversations), dict[int, str]()
    together: dict[str, list[int]] = {}
    for index, offered in enumerate(tools):
        together.setdefault(json.dumps(offered), []).append(index)
    # One call for all conversations with the same tools: the template is looked up and compiled once.
    for indices in together.values():
        offered = marked(tokenizer, tools[indices[0]])
        alike = [marked_messages(tokenizer, conversations[index]) for index in indices]
        try:
            rendered = tokenizer.apply_chat_template(alike, tools=offered, tokenize=False, **options)
        except (jinja2.TemplateError, TypeError):
            for index, alone in zip(indices, alike, strict=True):
                try:
                    texts[index] = tokenizer.apply_chat_template(alone, tools=offered, tokenize=False, **options)
                except (jinja2.TemplateError, TypeError) as error:
                    refused[index] = f"the chat template refuses it: {error}"
            continue
        for index, text in zip(indices, rendered, strict=True):
            texts[index] = text
    return texts, refused


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of every rendered text, without special tokens around it."""
    starts = range(0, len(texts), _AT_ONCE)
    return [ids for start in starts for ids in token_ids(tokenizer, texts[start : start + _AT_ONCE])]


def calls_problem(messages: Sequence[ChatMessage], text: str, which: str = "") -> str:
    """That a rendered text lacks calls of its messages, as its template ignores `tool_calls`; else "".

    which: what tells the calls from others, as " of message 1".
    """
    called = dict.fromkeys(call["function"]["name"] for message in messages for call in message.get("tool_calls", ()))
    names = [name for name in called if name not in unmarked(text)]
    return f"the chat template does not show the calls{which} in `tool_calls`: {', '.join(names)}" if names else ""


def _apart(tokenizer: Any, text: str) -> list[int]:
    """Of a text with marks: what stands between two of the template's special tokens, and has marks, is plain."""
    _, structure = _patterns(tokenizer, len(tokenizer), tuple(map(str, tokenizer.all_special_tokens)))
    pieces, at = list[str](), 0
    for hit in structure.finditer(text):
        if hit[1] is not None:
            pieces += [text[at : hit.start()], hit[0]]
            at = hit.end()
    ids, parsed = list[int](), ""
    for piece in [*pieces, text[at:], ""]:
        if _MARK not in piece:
            parsed += piece
            continue
        ids += tokenizer(parsed, add_special_tokens=False)["input_ids"] if parsed else []
        ids += tokenizer(unmarked(piece), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        parsed = ""
    return ids + (tokenizer(parsed, add_special_tokens=False)["input_ids"] if parsed else [])


def _marked(special: re.Pattern[str], content: Any) -> Any:
    if isinstance(content, str):
        return special.sub(_MARK + r"\g<0>", content)
    if isinstance(content, Mapping):
        return {_marked(special, key): _marked(special, cell) for key, cell in content.items()}
    return [_marked(special, cell) for cell in content] if isinstance(content, list | tuple) else content


@lru_cache(maxsize=8)
def _patterns(tokenizer: Any, size: int, named: tuple[str, ...]) -> tuple[re.Pattern[str] | None, re.Pattern[str]]:
    """Of any special token, and of one with its mark or, as group 1, without. size and named: they tell of changes."""
    added = {token.content: token.rstrip for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = sorted({text for text in (*added, *named) if text.strip()}, key=len, reverse=True)
    if not texts:
        return None, re.compile(r"(?!)()")
    bare = "|".join(map(re.escape, texts))
    # Blanks after some tokens are part of them.
    written = "|".join(re.escape(text) + r"\s*" * added.get(text, False) for text in texts)
    return re.compile(bare), re.compile(f"{_MARK}(?:{bare})|({written})")
