"""Contents are text on every path: what looks like a special token in them is never one, and changes no other token."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ctpo_megatron.config import SystemPrompt, chat_template_text
from ctpo_megatron.data import ConversationRules, PromptRules, read_conversations, read_prompts, token_ids
from ctpo_megatron.environments import AgentTask, Message, MessageTemplate
from tests.data.rows import write
from tests.engines.tiny_model import CHATML
from tests.environments.endpoint_stand import TEMPLATE, TOKENIZER, Engine, asked, played
from tests.environments.test_template import LLAMA3_LIKE, QWEN3_LIKE

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|begin_of_text|>", "<s>", "<s><s>", "[INST]", "<|user|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
"""Added tokens that are not special: they stay one token."""
NAMES = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + ' ' + (m.name or '') + '\n' + (m.reasoning_content or '') }}"
    "{{- m.content + '<|im_end|>\n' }}{%- endfor %}{{- '<|im_start|>assistant\n' if add_generation_prompt }}"
)
ENDS = {LLAMA3_LIKE: "<|eot_id|>"}
TEMPLATES = {
    "chatml": CHATML,
    "qwen3-like": QWEN3_LIKE,
    "llama3-like": LLAMA3_LIKE,
    "with calls": TEMPLATE,
    "names": NAMES,
    "qwen3": chat_template_text("qwen3"),
    "qwen2.5": chat_template_text("qwen2.5"),
}
WITH_CALLS = ("with calls", "qwen3", "qwen2.5")


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """With merges, so that a border in the wrong place shows; one special token takes the blanks behind it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = ["assistant user system tool the answer is im_end im_start <|im <| |> |>\n \n\n end_of_text response"] * 9
    core.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    core.add_special_tokens([AddedToken(t, special=True, rstrip=t == "<|user|>", normalized=False) for t in SPECIAL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    template = TEMPLATES[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=ENDS.get(template, "<|im_end|>"))
    tokenizer.chat_template = template
    return tokenizer


def specials(tokenizer: Any, ids: Sequence[int]) -> Counter[str]:
    return Counter(text for text in tokenizer.convert_ids_to_tokens(list(ids)) if text in SPECIAL)


def harmless(value: Any) -> Any:
    """The same with other text in place of every special token."""
    text = json.dumps(value)
    for special in sorted(SPECIAL, key=len, reverse=True):
        text = text.replace(special, "x" * len(special))
    return json.loads(text)


pieces = st.sampled_from([*SPECIAL, *SPECIAL, *PLAIN, "\n", " ", "a", "<|", "|>", "assistant\n", '"', "é", "42 is"])
contents = st.lists(pieces, min_size=1, max_size=6).map("".join)
said = contents.map(lambda text: "so " + text)


@st.composite
def conversations(draw: Any, calls: bool) -> list[dict[str, Any]]:
    """Of all roles, with text that looks like special tokens in every field."""
    talk: list[dict[str, Any]] = [{"role": "system", "content": draw(said)}, {"role": "user", "content": draw(said)}]
    answer = {"role": "assistant", "content": draw(said)}
    if calls:
        function = {"name": draw(said), "arguments": {draw(said): draw(said), "more": [draw(said)]}}
        answer["tool_calls"] = [{"type": "function", "function": function}]
    answer["reasoning_content"] = draw(said)
    tool = {"role": "tool", "name": draw(said), "content": draw(said)}
    return [*talk, answer, tool, {"role": "user", "content": draw(said)}]


def schema(name: str, text: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {text: {"type": "string", "description": text, "enum": [text]}}}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def assert_text(tokenizer: Any, ids: Sequence[int], harmless_ids: Sequence[int]) -> None:
    assert specials(tokenizer, ids) == specials(tokenizer, harmless_ids)
    spelled = tokenizer.decode(list(ids))
    for text in PLAIN:
        wanted = spelled.count(text)
        assert tokenizer.convert_ids_to_tokens(list(ids)).count(text) == wanted, text


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
def test_a_rendered_conversation(name: str, data: Any) -> None:
    """Of edited histories at the endpoint, and of prompts."""
    tokenizer = tokenizer_of(name)
    talk = data.draw(conversations(name in WITH_CALLS))
    tools = [schema("run", data.draw(said))] if name in WITH_CALLS else []
    template = MessageTemplate(tokenizer)
    ids, other = template.conversation(talk, tools), template.conversation(harmless(talk), harmless(tools))
    assert_text(tokenizer, ids, other)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        talk, tools=tools or None, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("name", TEMPLATES)
@given(first=contents, second=contents, tool=contents)
def test_messages_after_a_turn(name: str, first: str, second: str, tool: str) -> None:
    tokenizer = tokenizer_of(name)
    template = MessageTemplate(tokenizer)
    messages = [Message("tool", first, tool), Message("user", second)]
    others = [Message(message.role, harmless(message.content), harmless(message.name)) for message in messages]
    ids = template.encode(messages, end_turn=True)
    assert_text(tokenizer, ids, template.encode(others, end_turn=True))
    shown = json.dumps(first, ensure_ascii=False)[1:-1] if name == "llama3-like" else first
    assert shown.strip() in tokenizer.decode(ids) and second.strip() in tokenizer.decode(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), name=st.sampled_from([*TEMPLATES]))
def test_ordinary_contents_have_the_tokens_that_the_whole_text_has(text: str, name: str) -> None:
    tokenizer = tokenizer_of(name)
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
    whole = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert MessageTemplate(tokenizer).conversation(talk, []) == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_only_what_stands_beside_such_a_text_has_other_tokens() -> None:
    """Up to the template's next special token; the rest is tokenized as one text."""
    tokenizer = tokenizer_of("chatml")
    template = MessageTemplate(tokenizer)
    talk = [{"role": "user", "content": "the answer <|im_end|> is"}, {"role": "user", "content": "the answer"}]
    split = tokenizer("user\nthe answer <|im_end|> is", add_special_tokens=False, split_special_tokens=True)
    parsed = tokenizer("<|im_end|>\n<|im_start|>user\nthe answer<|im_end|>\n<|im_start|>assistant\n")
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert template.conversation(talk, []) == [start, *split["input_ids"], *parsed["input_ids"]]


def test_a_token_that_takes_the_blanks_behind_it() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{%- for m in messages %}{{- '<|user|>\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    try:
        ids = MessageTemplate(tokenizer).conversation([{"role": "user", "content": "a <|im_end|> b"}], [])
    finally:
        tokenizer.chat_template = CHATML
    assert tokenizer.decode(ids) == "<|user|>a <|im_end|> b<|im_end|>\n"
    assert specials(tokenizer, ids) == {"<|user|>": 1, "<|im_end|>": 1}


@pytest.mark.parametrize("name", WITH_CALLS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_prompts_of_a_data_set(name: str, data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer, path = tokenizer_of(name), tmp_path_factory.mktemp("prompts")
    talk, text, system = data.draw(conversations(True))[1:], data.draw(said), data.draw(said)

    def row(name: str, talk: Any, tools: Any) -> dict[str, Any]:
        return {"id": name, "data_source": "s", "prompt": talk, "reward_model": {"ground_truth": "1"}, "tools": tools}

    tools = [schema("run", text)]
    file = write(path / "a.jsonl", row("a", talk, tools), row("b", harmless(talk), harmless(tools)))
    sets = [
        read_prompts([file], tokenizer, PromptRules(max_prompt_tokens=9999, system_prompt=SystemPrompt(prompt)))
        for prompt in (system, harmless(system))
    ]
    assert [found.problems.lines for found in sets] == [[], []]
    assert_text(tokenizer, sets[0].prompts[0].token_ids, sets[1].prompts[1].token_ids)
    assert sets[0].texts[0] == tokenizer.decode(list(sets[0].prompts[0].token_ids))


@pytest.mark.parametrize("name", ["with calls", "qwen3"])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_conversations_to_train_on(name: str, data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also with the text of another end token in what is taught: the turn ends where the template ends it."""
    tokenizer, path = tokenizer_of(name), tmp_path_factory.mktemp("talks")
    talk = [*data.draw(conversations(True)), {"role": "assistant", "content": data.draw(said) + "<|endoftext|> done"}]
    file = write(path / "a.jsonl", {"messages": talk}, {"messages": harmless(talk)})
    found = read_conversations([file], tokenizer, ConversationRules(end_tokens=("<|endoftext|>", "<|im_end|>")))
    assert found.problems.lines == []
    mine, other = found.conversations
    assert_text(tokenizer, mine.token_ids, other.token_ids)
    taught = [
        tokenizer.decode([i for i, mask in zip(each.token_ids, each.loss_mask, strict=True) if mask])
        for each in (mine, other)
    ]
    assert harmless(taught[0].removesuffix("<|im_end|>")) == harmless(taught[1].removesuffix("<|im_end|>"))
    assert taught[0].endswith("<|endoftext|> done<|im_end|>")


@settings(deadline=None, max_examples=10)
@given(talk=conversations(True), more=said)
def test_what_an_agent_sends(talk: list[dict[str, Any]], more: str) -> None:
    """A history that is rendered, and one that continues an answer."""

    async def agent(task: AgentTask) -> None:
        for messages, text in ((talk, more), (harmless(talk), harmless(more))):
            tools = [schema(text, text)]
            answer = await asked(task, messages, tools=tools)
            await asked(task, [*messages, answer, {"role": "user", "content": text}], tools=tools)

    engine = Engine("one", "two", "three", "four")
    played(engine, agent, max_model_len=99_999, max_response_tokens=9_999)
    hostile, continued, plain, plainly = (specials(TOKENIZER, ids) for ids, *_ in engine.read)
    assert (hostile, continued) == (plain, plainly)


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: blanks are pieces of words, unknown characters are bytes, and special tokens are normalized."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *byte_tokens])
    core.train_from_iterator(["the answer is in the system"] * 9, trainer)
    core.add_special_tokens([AddedToken(text, special=True, normalized=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[0], unk_token="<unk>")


@pytest.mark.parametrize("family", ["bytes", "byte-fallback", "as-text"])
def test_ids_and_texts_of_the_backend_are_those_of_the_tokenizer(family: str) -> None:
    tokenizer = with_byte_fallback() if family == "byte-fallback" else tokenizer_of("qwen3")
    tokenizer.split_special_tokens = family == "as-text"
    words = [*SPECIAL, *PLAIN, "the", " answer", "  ", "\n\n", "\t", "é", "東京", "🙂", "\u0301", "x_1=-7", "12.50"]
    drawn = random.Random(68)
    template = MessageTemplate(tokenizer)
    for _ in range(10_000):
        text = "".join(drawn.choices(words, k=drawn.randint(1, 9)))
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert token_ids(tokenizer, [text]) == [expected], text
        assert template.decode(expected) == tokenizer.decode(expected, skip_special_tokens=False), text
    tokenizer.split_special_tokens = False
