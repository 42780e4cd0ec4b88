"""Segment-wise tokenization against whole-text tokenization, masks, errors and the batch stream."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections import Counter
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from ctpo_megatron.data import DataError, Trajectory, batch_order, batches
from tests.data.rows import write
from tests.support.prompts import load_conversations

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.fixture(scope="module")
def records(toolmath, tokenizer) -> list[Trajectory]:
    return load_conversations([str(toolmath / "sft.parquet")], tokenizer)


def test_segments_equal_the_whole_text(toolmath, tokenizer, records):
    conversations = pq.read_table(toolmath / "sft.parquet")["messages"].to_pylist()
    assert len(records) == len(conversations)
    for messages, record in zip(conversations, records, strict=True):
        text = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
        assert record.token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_model_is_taught_its_turns_with_their_end_and_nothing_else(toolmath, tokenizer, records):
    conversations = pq.read_table(toolmath / "sft.parquet")["messages"].to_pylist()
    for messages, record in zip(conversations, records, strict=True):
        assert record.response_mask == record.loss_mask
        said = [token for token, mask in zip(record.token_ids, record.loss_mask, strict=True) if mask]
        wanted = "".join(message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant")
        assert tokenizer.decode(said) == wanted
        assert max(record.turn) == sum(message["role"] == "assistant" for message in messages)
        assert record.turn == sorted(record.turn)
        assert record.loss_mask[0] == 0 and record.loss_mask[-1] == 1
    assert records[7].prompt_id == "sft/7"


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ("{{ m.content if loop.last else '...' }}<|im_end|>", "row 0 column 'messages': the chat template renders "),
        ("{{ m.content }}\n", "does not end message 1 with <|im_end|>"),
    ],
    ids=["rewrites history", "no end of turn"],
)
def test_templates_that_no_turn_can_be_taught_with_are_refused(tmp_path, tokenizer, shown, message):
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{% for m in messages %}" + shown + "{% endfor %}"
    with pytest.raises(DataError, match=re.escape(message)):
        load_conversations([write(tmp_path / "a.parquet", {"messages": TALK + TALK})], other)


def test_all_rows_that_the_template_refuses_are_named(tmp_path, tokenizer):
    other = copy.deepcopy(tokenizer)
    late = "{% if not loop.first and m.role == 'system' %}{{ raise_exception('system must come first') }}{% endif %}"
    other.chat_template = "{% for m in messages %}" + late + "{{ m.content }}<|im_end|>{% endfor %}"
    bad = [*TALK, {"role": "system", "content": "s"}, {"role": "assistant", "content": "t"}]
    rows = [{"messages": TALK}, {"messages": bad}, {"messages": TALK}]
    rows.append({"messages": bad, "tools": [{"type": "function", "function": {"name": "f"}}]})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError) as caught:
        load_conversations([str(tmp_path / "a.jsonl")], other)
    message = str(caught.value)
    assert "2 problems" in message
    for row in (1, 3):
        assert f"row {row} column 'messages': the chat template refuses it: system must come first" in message


def test_batches_follow_from_the_seed(records):
    def names(seed: int) -> list[list[str]]:
        taken = itertools.islice(batches(records, 32, seed=seed), len(records) // 32)
        return [[record.prompt_id for record in batch] for batch in taken]

    assert names(0) == names(0) != names(1)


def test_the_order_of_batches_is_known_by_what_it_follows_from(records):
    ours = batch_order(records, 32, 0)
    assert ours == batch_order([replace(record) for record in records], 32, 0)
    assert batch_order(records, 8, 1) == {**ours, "seed": 1, "conversations_per_step": 8}
    last = records[-1]
    for name in ("token_ids", "loss_mask"):
        tokens = last.tokens.copy()
        tokens[name][-1] = 1 - tokens[name][-1] if name == "loss_mask" else tokens[name][-1] + 1
        assert batch_order([*records[:-1], replace(last, tokens=tokens)], 32, 0) != ours
    assert batch_order([records[1], records[0], *records[2:]], 32, 0) != ours


def _conversation(length: int) -> Trajectory:
    conversation = Trajectory(prompt_id=str(length), sample_index=0, seed=0)
    conversation.append_context([1] * length, 0)
    return conversation


@pytest.mark.parametrize("per_step", [1, 2, 7, 8, 9, 16, 22])
@pytest.mark.parametrize("count", [22, 23, 100, 151])
def test_no_conversation_is_used_twice_more_than_another(count, per_step):
    """At any time, whatever is left over from an epoch: neither the longest nor any others are left out."""
    conversations = [_conversation(1 + n) for n in range(count)]
    used = Counter({conversation.prompt_id: 0 for conversation in conversations})
    for batch in itertools.islice(batches(conversations, per_step, 0), 12 * count // per_step):
        ids = [conversation.prompt_id for conversation in batch]
        assert len(set(ids)) == len(ids) == per_step
        used.update(ids)
        assert max(used.values()) - min(used.values()) <= 1


def test_batches_hold_conversations_of_similar_length(records):
    def padding(groups: list[list[Trajectory]]) -> int:
        return sum(max(map(len, group)) * len(group) - sum(map(len, group)) for group in groups)

    bucketed = list(itertools.islice(batches(records, 32, seed=0), len(records) // 32))
    plain = [records[start : start + 32] for start in range(0, len(records) - 31, 32)]
    assert padding(bucketed) < padding(plain) / 3


def test_too_few_conversations(records):
    with pytest.raises(ValueError, match=r"3 conversations cannot fill a batch of 4: lower sft\."):
        batches(records[:3], 4, seed=0)
