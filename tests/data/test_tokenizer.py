"""The tokenizer that checks read without torch gives the text and the ids of the one that training loads."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from ctpo_megatron.environments import read_tokenizer

SCHEMA = {"type": "function", "function": {"name": "code_interpreter", "parameters": {"a": "<&'\u00e9"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " 12 + 30 = ?\n"},
    {"role": "assistant", "content": "I call."},
    {"role": "tool", "content": "42"},
]
# What jinja does otherwise than transformers sets it: blanks around blocks, HTML in tojson, loop controls, generation.
OPTIONS = """\
{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% generation %}
{{ m.content }}
    {% endgeneration %}
{% endfor %}
{{ tools | tojson(indent=1) }} {{ strftime_now('%Y') }}"""


def shipped() -> list[Path]:
    """Templates that an installed package brings along; found without importing it."""
    from importlib.util import find_spec

    spec = find_spec("vllm")
    places = (
        []
        if spec is None
        else [Path(p) / "transformers_utils/chat_templates" for p in spec.submodule_search_locations or ()]
    )
    return [file for place in places for file in sorted(place.glob("*.jinja"))]


def outcome(tokenizer, talk, template: str, tools) -> str:
    """The text, or what the template refuses."""
    arguments = {"chat_template": template, "tools": tools, "add_generation_prompt": True, "bos_token": "<s>"}
    try:
        return tokenizer.apply_chat_template(talk, tokenize=False, **arguments)
    except jinja2.TemplateError as refused:
        return repr(refused)


@pytest.mark.parametrize("template", [None, OPTIONS, *shipped()], ids=lambda t: getattr(t, "stem", str(t)[:7]))
def test_texts_and_ids_are_those_of_training(toolmath: Path, tokenizer, template: Path | str | None) -> None:
    light = read_tokenizer(toolmath / "model")
    text = template.read_text() if isinstance(template, Path) else template or tokenizer.chat_template
    for talk, tools in ((TALK, None), (TALK, [SCHEMA]), (TALK[1:2], None)):
        rendered, expected = (outcome(each, talk, text, tools) for each in (light, tokenizer))
        assert rendered == expected
        assert light(rendered)["input_ids"] == tokenizer(expected)["input_ids"]
    assert light.chat_template == tokenizer.chat_template
    assert (light.eos_token_id, len(light)) == (tokenizer.eos_token_id, len(tokenizer))
