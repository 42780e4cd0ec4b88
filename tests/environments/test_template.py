"""Observation tokens follow each model family's own chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctpo_megatron.environments import Message, MessageTemplate, TokenizerError, stop_token_ids
from tests.engines.tiny_model import CHATML, tiny_tokenizer

QWEN3_LIKE = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- for t in tools %}{{- t | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{%- if loop.last or loop.index0 > 0 %}"
    "{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
LLAMA3_LIKE = (
    "{{- '<|begin_of_text|>' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}"
    "{%- else %}{{- m.content }}{%- endif %}{{- '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
NO_TOOL = (
    "{%- for m in messages %}{%- if m.role != 'tool' %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
)
REFUSES_TOOL = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}{{- raise_exception('no tools here') }}{%- endif %}{%- endfor %}"
)
NO_END = "{%- for m in messages %}{{- m.role + ': ' + m.content + '\n' }}{%- endfor %}"


def tool(text: str) -> Message:
    return Message("tool", text, "code_interpreter")


def test_a_turn_that_the_model_did_not_end_is_ended_first() -> None:
    tokenizer = tiny_tokenizer()
    template = MessageTemplate(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert template.encode([tool("42")], end_turn=True) == [end, *template.encode([tool("42")])]


def test_qwen3_like_opens_the_next_turn_without_thinking() -> None:
    tokenizer = tiny_tokenizer(QWEN3_LIKE)
    text = tokenizer.decode(MessageTemplate(tokenizer, {"enable_thinking": False}).encode([tool("42")]))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert tokenizer.decode(MessageTemplate(tokenizer).encode([tool("42")])).endswith("<|im_start|>assistant\n")


USER = Message("user", "And now?")
TOOLS = [tool('line "one"\nline é'), Message("tool", "2", "search")]


@pytest.mark.parametrize("messages", [[USER], TOOLS, [*TOOLS, USER]], ids=["user", "two tools", "mixed"])
@pytest.mark.parametrize(
    ("chat_template", "eos"), [(CHATML, "<|im_end|>"), (QWEN3_LIKE, "<|im_end|>"), (LLAMA3_LIKE, "<|eot_id|>")]
)
def test_any_messages_come_as_the_template_writes_them(messages: list[Message], chat_template: str, eos: str) -> None:
    tokenizer = tiny_tokenizer(chat_template, eos=eos)
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "call"}]
    talk += [{"role": message.role, "content": message.content} for message in messages]
    whole = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    ids = MessageTemplate(tokenizer).encode(messages)
    assert whole.endswith(f"call{eos}{tokenizer.decode(ids)}")
    assert tokenizer(whole, add_special_tokens=False)["input_ids"][-len(ids) :] == ids


@pytest.mark.parametrize(
    ("chat_template", "reason"),
    [(NO_TOOL, "exactly once"), (REFUSES_TOOL, "no tools here"), (NO_END, "none of the model's end tokens")],
)
def test_unusable_templates_are_named(chat_template: str, reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason):
        MessageTemplate(tiny_tokenizer(chat_template)).encode([tool("x")])


def test_stop_ids_join_tokenizer_and_generation_config(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    assert stop_token_ids(tokenizer, tmp_path) == {tokenizer.eos_token_id}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}), encoding="utf-8")
    assert stop_token_ids(tokenizer, tmp_path) == {3, 4, tokenizer.eos_token_id}
    tokenizer.eos_token = None
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(TokenizerError, match="end token"):
        stop_token_ids(tokenizer, tmp_path)


def test_either_end_token_of_the_model_is_recognized() -> None:
    tokenizer = tiny_tokenizer(CHATML, eos="<|endoftext|>")
    stops = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    assert MessageTemplate(tokenizer, None, stops).frame([tool("x")]).texts[0].startswith("\n<|im_start|>user")
