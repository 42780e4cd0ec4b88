"""Encodes messages as tokens with the tokenizer's own chat template, decodes turns, and finds the ids that end them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_megatron.data import (
    ChatMessage,
    calls_problem,
    marked,
    marked_messages,
    render,
    special_tokens,
    token_ids,
)
from ctpo_megatron.environments.protocol import Message, Schema
from ctpo_megatron.environments.tokenizer import TokenizerError, decode_of
from ctpo_megatron.environments.toolbox import well_formed

_ASSISTANT = "ASSISTANTPROBE"


def stop_token_ids(tokenizer: Any, model_path: str | Path) -> frozenset[int]:
    """Ids that end a model turn: the tokenizer's eos and every eos of the model's generation_config.json.

    Without one there, every eos of config.json, as transformers has it.
    """
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            found.update(map(int, eos if isinstance(eos, list) else [eos]))
            break
    if not found:
        raise TokenizerError(f"{model_path}: neither the tokenizer nor generation_config.json names an end token")
    return frozenset(found)


def end_tokens(tokenizer: Any, model_path: str | Path) -> tuple[str, ...]:
    """Return the texts of `stop_token_ids`. Raises TokenizerError."""
    return tuple(tokenizer.convert_ids_to_tokens(sorted(stop_token_ids(tokenizer, model_path))))


@dataclass(frozen=True, slots=True)
class Frame:
    """The template's text around the contents of some messages: one text more than messages.

    json_escaped: for each message, whether the template escapes its content as in a JSON string.
    end: the end token before them, which closes the assistant's message.
    """

    texts: tuple[str, ...]
    json_escaped: tuple[bool, ...]
    end: str


class MessageTemplate:
    """Turns messages into the token ids between a turn's stop token and the next turn's first token.

    Derived once for each sequence of roles from a rendered conversation [user, assistant, *messages]: the text after
    the assistant's end token, with placeholders for the contents. The earlier conversation is never rendered again.
    schemas: of the tools offered to the model. stop_ids: end a model turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template_kwargs: dict[str, Any] | None = None,
        stop_ids: Sequence[int] = (),
        schemas: Sequence[Schema] = (),
    ) -> None:
        self._tokenizer, self._kwargs, self._decode = tokenizer, chat_template_kwargs or {}, decode_of(tokenizer)
        # Some templates render a tool answer only with the schemas.
        self._offers = [[dict(schema) for schema in schemas], None] if schemas else [None]
        self._any_tool = str(schemas[0]["function"]["name"]) if schemas else ""
        self.stop_ids = frozenset(stop_ids)
        stops = self.stop_ids | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())
        self._stop_texts = [tokenizer.convert_ids_to_tokens(int(i)) for i in sorted(stops)]
        self._frames: dict[tuple[tuple[str, str], ...], Frame] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, special tokens included."""
        return self._decode(list(token_ids))

    def encode(self, messages: Sequence[Message], *, end_turn: bool = False) -> list[int]:
        """Token ids of the messages, without the end token before them or with it; the template's special tokens are
        parsed, those in contents are text.

        Raises TokenizerError when the template refuses or drops a role, or renders no known end token before it;
        TypeError for what is no Message of texts.
        """
        messages = [_well_formed(message) for message in messages]
        frame = self.frame(messages)
        text = (frame.end if end_turn else "") + frame.texts[0]
        for message, escaped, after in zip(messages, frame.json_escaped, frame.texts[1:], strict=True):
            content = json.dumps(message.content, ensure_ascii=False)[1:-1] if escaped else message.content
            text += marked(self._tokenizer, content) + after
        return token_ids(self._tokenizer, [text])[0] if text else []

    def conversation(self, messages: Sequence[ChatMessage], tools: Sequence[Schema]) -> list[int]:
        """Token ids of a whole conversation up to the model's next turn, rendered as prompts of data files are.

        Raises TokenizerError when the template refuses it, or leaves its tool calls out.
        """
        offered, options = [dict(tool) for tool in tools] or None, {"add_generation_prompt": True, **self._kwargs}
        (text,), refused = render([messages], [offered], self._tokenizer, options)
        if problem := refused.get(0) or calls_problem(messages, text):
            raise TokenizerError(problem)
        return token_ids(self._tokenizer, [text])[0]

    def check_end(self) -> None:
        """Raises TokenizerError when no end token closes an assistant's message, so that no turn would ever end."""
        self.frame([Message("user", "")])

    def frame(self, messages: Sequence[Message]) -> Frame:
        """Return the frame of messages with these roles and tool names."""
        key = tuple((message.role, message.name) for message in messages)
        if key not in self._frames:
            # The quote shows whether the template writes contents as JSON: then it comes back escaped.
            holes = [f'HOLE{place}"PROBE' for place in range(len(messages))]
            rendered = self._render([Message(role, hole, name) for (role, name), hole in zip(key, holes, strict=True)])
            roles = [message.role for message in messages]
            self._frames[key] = _split(rendered, holes, roles, self._stop_texts, self._advice)
        return self._frames[key]

    def _render(self, messages: Sequence[Message]) -> str:
        conversation: list[dict[str, str]] = [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": _ASSISTANT},
        ]
        for place, message in enumerate(messages):
            tool = (
                {"name": message.name or self._any_tool, "tool_call_id": f"call{place:05d}"}
                if message.role == "tool"
                else {}
            )
            conversation.append({"role": message.role, **tool, "content": message.content})
        shown = marked_messages(self._tokenizer, conversation)
        last: Exception | None = None
        for tools in self._offers:
            offered = marked(self._tokenizer, tools)
            try:
                text = self._tokenizer.apply_chat_template(
                    shown, tools=offered, tokenize=False, add_generation_prompt=True, **self._kwargs
                )
            except Exception as error:  # jinja has its own exceptions, and templates may raise any
                last = error
                continue
            return str(text)
        roles = ", ".join(f'"{message.role}"' for message in messages)
        raise TokenizerError(f"the chat template cannot render a message of role {roles}: {last}") from last

    def _advice(self, text: str) -> str:
        """What to do when `text`, which follows an assistant's message, holds no end token."""
        special = special_tokens(self._tokenizer)
        closing = None if special is None else special.search(text)
        if closing is None:
            return "set model.chat_template to one that closes messages"
        number = self._tokenizer.convert_tokens_to_ids(closing[0])
        return f"it writes {closing[0]}: add {number}, the id of that, to eos_token_id of generation_config.json"


def _well_formed(message: Any) -> Message:
    if not isinstance(message, Message):
        raise TypeError(f"what the model is shown must be a Message, not a {type(message).__name__}")
    for name in ("role", "content", "name"):
        if not isinstance(value := getattr(message, name), str):
            raise TypeError(f"the {name} of a Message must be a str, not a {type(value).__name__}")
    return Message(well_formed(message.role), well_formed(message.content), well_formed(message.name))


def _split(
    rendered: str,
    holes: Sequence[str],
    roles: Sequence[str],
    stop_texts: Sequence[str],
    advice: Callable[[str], str],
) -> Frame:
    """The texts around the placeholders, starting at the end token of the assistant's message."""
    if rendered.count(_ASSISTANT) != 1:
        raise TokenizerError("the chat template does not show an assistant message exactly once")
    rest, texts, escaped = rendered.split(_ASSISTANT)[1], [], []
    for hole, role in zip(holes, roles, strict=True):
        as_json = hole not in rest
        probe = json.dumps(hole)[1:-1] if as_json else hole
        if rest.count(probe) != 1:
            raise TokenizerError(f'the chat template does not show a message of role "{role}" exactly once')
        before, rest = rest.split(probe)
        texts.append(before)
        escaped.append(as_json)
    ends = [(texts[0].find(stop), stop) for stop in stop_texts if stop in texts[0]]
    if not ends:
        raise TokenizerError(
            f"the chat template writes none of the model's end tokens {list(stop_texts)} after an assistant message; "
            f"{advice(texts[0])}"
        )
    position, stop = min(ends)
    return Frame((texts[0][position + len(stop) :], *texts[1:], rest), tuple(escaped), stop)
