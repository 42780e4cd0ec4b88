"""Tool observations as tokens, learned from the tokenizer's own chat template; and the ids a turn stops at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctpo_megatron.environments.tools import TOOL_NAME, TOOL_SCHEMA

_ASSISTANT = "ASSISTANTPROBE"
_TOOL = 'TOOL"PROBE'
_TOOL_ESCAPED = json.dumps(_TOOL)[1:-1]


class TemplateError(ValueError):
    """The chat template cannot show a tool message."""


def stop_token_ids(tokenizer: Any, model_path: str | Path) -> frozenset[int]:
    """Ids that end a model turn: the tokenizer's eos and every eos of the model's generation_config.json."""
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    file = Path(model_path) / "generation_config.json"
    if file.is_file():
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        found.update(int(i) for i in (eos if isinstance(eos, list) else [eos] if eos is not None else []))
    if not found:
        raise TemplateError(f"{model_path}: neither the tokenizer nor generation_config.json names an end token")
    return frozenset(found)


class ObservationTemplate:
    """Turns tool output into the token ids between a turn's stop token and the next turn's first token.

    Derived once from a rendered [user, assistant, tool] conversation: what the template writes after the assistant's
    end token, with the tool text as a hole in it. Raises TemplateError when the template refuses or drops the role
    "tool", or writes no end token known to the model between the two messages.
    """

    def __init__(
        self, tokenizer: Any, chat_template_kwargs: dict[str, Any] | None = None, stop_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        stops = set(stop_ids) | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())
        stop_texts = [tokenizer.convert_ids_to_tokens(int(i)) for i in sorted(stops)]
        rendered = self._render(chat_template_kwargs or {})
        self.before, self.after, self.json_escaped = _split(rendered, stop_texts)
        added = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        self._special = sorted(added | {str(t) for t in tokenizer.all_special_tokens})

    def _render(self, kwargs: dict[str, Any]) -> str:
        messages = [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": _ASSISTANT},
            {"role": "tool", "name": TOOL_NAME, "tool_call_id": "call00000", "content": _TOOL},
        ]
        last: Exception | None = None
        # Templates differ in whether a tool answer needs the schema in sight.
        for tools in ([TOOL_SCHEMA], None):
            try:
                text = self._tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
                )
            except Exception as error:  # jinja raises its own, and templates raise anything they like
                last = error
                continue
            return str(text)
        raise TemplateError(f'the chat template cannot render a message of role "tool": {last}') from last

    def encode(self, text: str) -> list[int]:
        """Token ids of the whole insertion for tool output `text`; special tokens of the template are parsed.

        A special token spelled out inside `text` stays plain text: a program cannot close its own message.
        """
        if self.json_escaped:
            text = json.dumps(text, ensure_ascii=False)[1:-1]
        if not any(token in text for token in self._special):
            return self._ids(self.before + text + self.after)
        inner = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [*self._ids(self.before), *inner, *self._ids(self.after)]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _split(rendered: str, stop_texts: Sequence[str]) -> tuple[str, str, bool]:
    """(text before the tool output, text after it, whether the template JSON-escapes it)."""
    probe = _TOOL if _TOOL in rendered else _TOOL_ESCAPED
    if rendered.count(_ASSISTANT) != 1 or rendered.count(probe) != 1:
        raise TemplateError('the chat template does not show a message of role "tool" exactly once')
    between = rendered.split(_ASSISTANT)[1]
    between, after = between.split(probe)
    ends = [(between.find(stop), stop) for stop in stop_texts if stop in between]
    if not ends:
        raise TemplateError(
            f"the chat template writes none of the model's end tokens {list(stop_texts)} after an assistant message"
        )
    position, stop = min(ends)
    return between[position + len(stop) :], after, probe == _TOOL_ESCAPED


class TokenizerCodec:
    """The episode's view of a tokenizer: decode model turns, encode observations."""

    def __init__(self, tokenizer: Any, template: ObservationTemplate, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.stop_ids = stop_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def observation_ids(self, text: str) -> list[int]:
        """See ObservationTemplate.encode."""
        return self._template.encode(text)
