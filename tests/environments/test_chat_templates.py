"""Our training templates: the formats' own texts, histories that only grow; templates that cannot be trained with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.config import Config, chat_template_text
from ctpo_megatron.environments import TokenizerError, check_chat_template, offered_schemas, use_chat_template
from tests.data.rows import write
from tests.engines.tiny_model import CHATML, tiny_tokenizer
from tests.optional.qwen_formats import ANSWER, CASES, LONG, TEXTS, TOOL, TRL, USER, rendered, texts
from tests.support.deadlines import scaled
from tests.support.minimal import minimal
from tests.support.prompts import load_conversations

KNOWN: dict[str, str] = json.loads(TEXTS.read_text(encoding="utf-8"))
OFF = {"enable_thinking": False}


def check(tokenizer: Any, given: Config) -> None:
    check_chat_template(tokenizer, given.model, offered_schemas(given.data, given.rollout))


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_the_format(name: str) -> None:
    model, messages, arguments = CASES[name]
    assert rendered(chat_template_text(model), messages, arguments) == KNOWN[name]


@pytest.mark.network
@pytest.mark.slow
def test_the_known_texts_are_those_of_the_templates_that_trl_ships(tmp_path: Path) -> None:
    """1 MB from the package index."""
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, f"trl=={TRL}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(300))
    if done.returncode:
        pytest.skip(f"no package registry answers: {done.stderr.strip().splitlines()[-1]}")
    wheel = next(tmp_path.glob("*.whl"))
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, tmp_path], check=True, timeout=scaled(60))
    assert texts(tmp_path / "trl" / "chat_templates") == KNOWN


@pytest.mark.parametrize(("model", "kwargs"), [("qwen3", {}), ("qwen3", OFF), ("qwen2.5", {})])
@pytest.mark.parametrize("messages", LONG.values(), ids=LONG)
def test_a_history_only_grows(model: str, kwargs: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    text = ""
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            for end, go_on in ((at, True), (at + 1, False)):
                arguments = {"tools": [TOOL], "add_generation_prompt": go_on, **kwargs}
                longer = rendered(chat_template_text(model), messages[:end], arguments)
                assert longer.startswith(text)
                text = longer


def test_conversations_with_calls_are_taught_with_qwen3s_format(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template_text("qwen3"))
    said = "<tool_call>...</tool_call>"
    talk = [USER, {"role": "assistant", "content": said}, {"role": "tool", "content": "4"}, ANSWER]
    (record,) = load_conversations(
        [write(tmp_path / "a.parquet", {"messages": talk})], tokenizer, chat_template_kwargs=OFF
    )
    taught = tokenizer.decode([i for i, mask in zip(record.token_ids, record.loss_mask, strict=True) if mask])
    assert taught == f"{said}<|im_end|>{ANSWER['content']}<|im_end|>"
    assert tokenizer.decode(record.token_ids).count("<think>\n\n</think>\n\n") == 2


def test_thinking_that_was_switched_off_cannot_be_taught() -> None:
    messages = [USER, {**ANSWER, "reasoning_content": "Simple."}]
    with pytest.raises(Exception, match="enable_thinking is false, and a message has reasoning_content"):
        rendered(chat_template_text("qwen3"), messages, {"tools": None, "add_generation_prompt": False, **OFF})


def test_a_file_takes_the_place_of_the_tokenizers_template(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    tokenizer = tiny_tokenizer()
    for value, text in ((str(tmp_path / "mine.jinja"), "{{ messages[0].content }}"), (None, CHATML)):
        tokenizer.chat_template = CHATML
        use_chat_template(tokenizer, minimal(model={"chat_template": value}).model)
        assert tokenizer.chat_template == text


def test_an_argument_that_the_template_does_not_know_is_refused() -> None:
    tokenizer = tiny_tokenizer(chat_template_text("qwen3"))
    check(tokenizer, minimal(model={"chat_template_kwargs": OFF}))
    with pytest.raises(TokenizerError, match=r"chat_template_kwargs: .* knows no enable_thinking:false; correct"):
        check(tokenizer, minimal(model={"chat_template_kwargs": {"enable_thinking:false": None}}))
