"""The chat completions API of OpenAI: requests that on-policy sampling can honour, and answers in its shape."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctpo_megatron.data import ChatMessage, check_messages, check_tools, plain_messages, plain_tools
from ctpo_megatron.environments.conversation import Answer
from ctpo_megatron.environments.episode import EpisodeOver, Sampling
from ctpo_megatron.environments.protocol import Schema

MODEL = "policy"
"""The name of the model that is trained."""

_IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "store",
    "user",
    "stream_options",
}
"""Fields that change nothing about what is sampled."""
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
}
"""Fields with the values that change nothing."""
_MOST_STOPS = 16
"""Texts to stop at, each of which is looked for after every token."""
_LISTS = ("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content")
"""Fields of OpenAI's messages that are ignored where they hold nothing."""


class RefusedRequest(Exception):
    """A request that is answered with an error, in OpenAI's shape. param: the field. code: OpenAI's word for it."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def body(self) -> dict[str, Any]:
        """Return the answer's body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one completion. limit: tokens of the answer, None: the run's. stop: texts that end it."""

    messages: tuple[ChatMessage, ...]
    tools: list[Schema]
    limit: int | None
    stop: tuple[str, ...]

    @classmethod
    def of(cls, given: Any, sampling: Sampling) -> ChatRequest:
        """From the JSON of a request. Raises RefusedRequest, with the field, for what cannot be honoured."""
        if not isinstance(given, dict):
            raise RefusedRequest("the body must be a JSON object with `model` and `messages`")
        fields = {name: value for name, value in given.items() if value is not None and name not in _IGNORED}
        if (model := fields.pop("model", MODEL)) != MODEL:
            raise RefusedRequest(
                f"there is no model {model!r:.80}: the one that is trained is {MODEL!r}",
                param="model",
                code="model_not_found",
                status=404,
            )
        messages = _messages(fields.pop("messages", None))
        tools = fields.pop("tools", [])
        if reason := check_tools(tools):
            raise RefusedRequest(f"tools: {reason}", param="tools")
        limits = [_limit(name, fields.pop(name)) for name in ("max_tokens", "max_completion_tokens") if name in fields]
        stop = _stop(fields.pop("stop", ()))
        silent = fields.get("tool_choice") == "none"
        for name, value in fields.items():
            _check_fixed(name, value, sampling)
        shown: list[Schema] = [] if silent else [*plain_tools(tools)]
        return cls(messages, shown, min(limits, default=None), stop)


def _messages(given: Any) -> tuple[ChatMessage, ...]:
    if isinstance(given, list):
        given = [_flat(message, index) for index, message in enumerate(given)]
    if reason := check_messages(given) or _unasked(given):
        raise RefusedRequest(f"messages: {reason}", param="messages")
    return plain_messages(given)


def _flat(message: Any, index: int) -> Any:
    """A message as data files have it: parts of text joined, and `developer` as `system`."""
    if not isinstance(message, dict):
        return message
    flat = {name: value for name, value in message.items() if value or name not in _LISTS}
    if isinstance(flat.get("content"), list):
        flat["content"] = "".join(_text(part, index) for part in flat["content"])
    if flat.get("role") == "developer":
        flat["role"] = "system"
    if flat.get("role") != "tool":  # of a participant, which chat templates do not show
        flat.pop("name", None)
    return flat


def _text(part: Any, index: int) -> str:
    """The text of a part of message `index`. Raises RefusedRequest for any other part."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        named = f"of type {kind!r:.80}" if kind else "without a type"
        named += ", and no text" if kind == "text" else ""
        raise RefusedRequest(
            f"messages: message {index} has a part {named}: this trainer supports parts of type 'text' alone, no "
            "images, sounds or files",
            param="messages",
        )
    return str(part["text"])


def _unasked(messages: Sequence[Mapping[str, Any]]) -> str:
    """That a message answers a call that no message before it makes; else ""."""
    called = False
    for index, message in enumerate(messages):
        if message["role"] == "tool" and not called:
            return (
                f"message {index} (tool) answers no call: give the `tool_call_id` of one in the `tool_calls` of an "
                "assistant message before it, or show the text as a user's"
            )
        called = called or bool(message.get("tool_calls"))
    return ""


def _limit(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise RefusedRequest(f"{name} is {value!r:.80}; give a whole number of at least 1", param=name)
    return value


def _stop(given: Any) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedRequest(f"stop is {given!r:.80}; give a text or a list of texts", param="stop")
    if len(texts) > _MOST_STOPS:
        raise RefusedRequest(f"stop has {len(texts):,} texts; give at most {_MOST_STOPS}", param="stop")
    return tuple(texts)


def _check_fixed(name: str, value: Any, sampling: Sampling) -> None:
    """Raises RefusedRequest for a value that would sample from another distribution than the run's, or is unknown."""
    own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    if name in own:
        if not _same(value, own[name]):
            raise RefusedRequest(
                f"{name} is {value!r:.80}, and the run samples with {own[name]:g}: leave it out, or set the run's "
                f"(rollout.{name}, in an evaluation eval.{name})",
                param=name,
            )
    elif name == "seed":
        raise RefusedRequest("seed: the run's seeds decide what is sampled: leave it out", param=name)
    elif name not in _FIXED:
        raise RefusedRequest(f"{name} is not supported: leave it out", param=name)
    elif not any(_same(value, allowed) for allowed in _FIXED[name]):
        allowed = " or ".join(json.dumps(each) for each in _FIXED[name])
        raise RefusedRequest(f"{name} is {value!r:.80}; leave it out, or give {allowed}", param=name)


def _same(value: Any, allowed: Any) -> bool:
    """Whether they are one value of JSON: for Python `true` is 1, too."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def over_budget(over: EpisodeOver) -> RefusedRequest:
    """Return the refusal of a call after the budget of an episode is exhausted."""
    if over.reason == "length":
        message = (
            "the conversation exceeds the maximum context length of the run (rollout.max_response_tokens, "
            "data.max_prompt_tokens, rollout.engine.max_model_len); it is over"
        )
        return RefusedRequest(message, param="messages", code="context_length_exceeded")
    budgets = {"max_turns": "calls (rollout.max_turns)", "tool_budget": "tool use (rollout.max_tool_calls, max_tool_s)"}
    return RefusedRequest(
        f"the conversation has used its {budgets.get(over.reason, over.reason)}; it is over", code=over.reason
    )


def completion(answer: Answer) -> dict[str, Any]:
    """Return the answer as a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {
                "id": id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for id, call in answer.calls.items()
        ]
    reason = "length" if not answer.turn.complete else "tool_calls" if answer.calls else "stop"
    return {
        "id": f"chatcmpl-{answer.turn.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": answer.read,
            "completion_tokens": answer.sampled,
            "total_tokens": answer.read + answer.sampled,
        },
    }


def models() -> dict[str, Any]:
    """Return the answer of `GET /v1/models`."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "ctpo"}]}
