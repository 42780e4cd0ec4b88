"""How the system prompt of a run joins prompts and conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.config import SystemPrompt
from ctpo_megatron.data import DataError, PromptRules
from ctpo_megatron.environments import FencedParser, offered_schemas, system_prompt
from tests.data.rows import row, write
from tests.data.test_conversations import TALK
from tests.support.minimal import minimal
from tests.support.prompts import load_conversations, load_prompts

USER, OWN = {"role": "user", "content": "q"}, {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize("chosen", [False, True])
def test_a_conversation_without_one_gets_it(chosen: bool) -> None:
    assert SystemPrompt("Box it.", chosen).before([USER]) == ({"role": "system", "content": "Box it."}, USER)


@pytest.mark.parametrize(
    ("prompt", "content"),
    [
        (SystemPrompt("Box it."), "Box it.\n\nBe kind."),  # the protocol comes before what the data say
        (SystemPrompt(), "Be kind."),
        (SystemPrompt("", chosen=True), "Be kind."),
        (SystemPrompt("Be kind.", chosen=True), "Be kind."),
    ],
)
def test_a_conversation_with_one_keeps_it(prompt: SystemPrompt, content: str) -> None:
    assert prompt.before([OWN, USER]) == ({"role": "system", "content": content}, USER)


def test_a_chosen_prompt_and_another_of_the_data_are_ambiguous(tmp_path: Path, tokenizer: Any) -> None:
    files = [write(tmp_path / "a.parquet", row(), row(prompt=[OWN, USER]))]
    prompt = SystemPrompt("Box it.", chosen=True)
    with pytest.raises(DataError, match=r"row 1 column 'prompt': .*data\.system_prompt is set: which") as caught:
        load_prompts(files, tokenizer, PromptRules(99, system_prompt=prompt))
    assert 'set data.system_prompt: "" to keep the messages of the data' in str(caught.value)
    files = [write(tmp_path / "b.parquet", {"messages": [OWN, *TALK]})]
    with pytest.raises(DataError, match=r"row 0 column 'messages': .*which of them counts"):
        load_conversations(files, tokenizer, system_prompt=prompt)


def test_it_is_what_the_model_sees(tmp_path: Path, tokenizer: Any) -> None:
    prompt = SystemPrompt("Box it.", chosen=True)
    rules = PromptRules(99, system_prompt=prompt)
    (read,) = load_prompts([write(tmp_path / "a.parquet", row())], tokenizer, rules)
    begin = "<|im_start|>system\nBox it.<|im_end|>\n<|im_start|>user\n"
    assert tokenizer.decode(list(read.token_ids)).startswith(begin)
    assert read.messages[0] == {"role": "system", "content": "Box it."}
    (spoken,) = load_conversations([write(tmp_path / "b.parquet", {"messages": TALK})], tokenizer, system_prompt=prompt)
    assert tokenizer.decode(spoken.token_ids).startswith(begin)


def test_each_protocol_has_its_own() -> None:
    hermes, fenced = (minimal(rollout={"tool_parser": parser}) for parser in ("hermes", "fenced"))
    assert system_prompt(hermes.data, hermes.rollout) == SystemPrompt()
    assert system_prompt(fenced.data, fenced.rollout) == SystemPrompt(FencedParser.system_prompt)
    offered = offered_schemas(hermes.data, hermes.rollout)
    assert [schema["function"]["name"] for schema in offered] == ["code_interpreter"]
    silent = minimal(rollout={"tool_parser": "hermes"}, data={"tool_in_prompt": False})
    assert offered_schemas(fenced.data, fenced.rollout) == offered_schemas(silent.data, silent.rollout) == []


def test_a_file_or_a_text_takes_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("Think.\nBox it.\n", encoding="utf-8")
    for value, text in ((str(tmp_path / "mine.txt"), "Think.\nBox it."), ("Box it.", "Box it."), ("", "")):
        given = minimal(rollout={"tool_parser": "fenced"}, data={"system_prompt": value})
        chosen = system_prompt(given.data, given.rollout)
        assert chosen == SystemPrompt(text, chosen=True)
