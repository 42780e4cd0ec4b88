"""The template of an export renders without keywords what the run rendered with `model.chat_template_kwargs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.config import ModelConfig, chat_template_text
from ctpo_megatron.environments import exported_chat_template, read_tokenizer
from tests.engines.tiny_model import tiny_tokenizer

MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
ECHO = "{%- for name in [a, b, c] %}{{ name | tojson }};{% endfor %}{{ messages[0].content }}"
OWN = (
    ECHO,
    "\n\n  {% if a is defined %}\n  with {{ a | tojson }}, {{ b | tojson }} and {{ c | tojson }}\n  {% endif %}\nend",
    "{%- macro said(text) -%}{{ a | tojson }}{{ b | tojson }}{{ c | tojson }}{{ text }}{%- endmacro -%}{{ said('x') }}",
)
VALUES: dict[str, Any] = {
    "a": False,
    "b": {"deep": [1, 2.5, None, True]},
    "c": 'a "quoted" \\ text\nof two lines, ü {{',
}


def rendered(directory: Path, template: str, **keywords: Any) -> str:
    tokenizer = read_tokenizer(directory)
    tokenizer.chat_template = template
    return str(tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **keywords))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("text", OWN)
def test_values_of_every_kind(directory: Path, text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    model = ModelConfig(path=str(directory), chat_template=str(file), chat_template_kwargs=VALUES)
    exported = exported_chat_template(model)
    assert exported is not None
    assert rendered(directory, exported) == rendered(directory, text, **VALUES)
    assert rendered(directory, exported, a="mine") == rendered(directory, text, **VALUES | {"a": "mine"})


@pytest.mark.parametrize("thinking", [True, False])
def test_qwen3_without_thinking(directory: Path, thinking: bool) -> None:
    text, keywords = chat_template_text("qwen3"), {"enable_thinking": thinking}
    model = ModelConfig(path=str(directory), chat_template="qwen3", chat_template_kwargs=keywords)
    exported = exported_chat_template(model)
    assert exported is not None
    assert rendered(directory, exported) == rendered(directory, text, **keywords)
    assert ("<think>" in rendered(directory, exported)) != thinking
    assert rendered(directory, exported, enable_thinking=not thinking) == rendered(
        directory, text, enable_thinking=not thinking
    )


def test_the_models_own_template_is_kept_as_it_is_or_gets_the_keywords(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = ECHO
    tokenizer.save_pretrained(tmp_path)
    assert exported_chat_template(ModelConfig(path=str(tmp_path))) is None
    exported = exported_chat_template(ModelConfig(path=str(tmp_path), chat_template_kwargs=VALUES))
    assert exported is not None and rendered(tmp_path, exported) == rendered(tmp_path, ECHO, **VALUES)
    ours = ModelConfig(path=str(tmp_path), chat_template="qwen3")
    assert exported_chat_template(ours) == chat_template_text("qwen3")
