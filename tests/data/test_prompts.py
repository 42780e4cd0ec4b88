"""The prompt reader's schema, its error messages, and the resumable sampler."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctpo_megatron.data import DataError, PromptRules, PromptSampler
from ctpo_megatron.data.prompt import Prompt
from tests.support.deadlines import scaled
from tests.support.prompts import load_prompts


def row(question: str = "What is 1+1?", **changes: Any) -> dict[str, Any]:
    base = {
        "data_source": "unit",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
    }
    return base | changes


def write(path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def errors(files, tokenizer, limit: int = 64) -> str:
    with pytest.raises(DataError) as caught:
        load_prompts([str(file) for file in files], tokenizer, PromptRules(limit))
    return str(caught.value)


def test_prompts_are_rendered_up_to_the_answer(toolmath, tokenizer):
    prompts = load_prompts([str(toolmath / "train.parquet")], tokenizer, PromptRules(64))
    assert len(prompts) == 64
    first = prompts[0]
    assert (first.id, first.data_source) == ("toolmath/train/0", "toolmath")
    assert first.extra == {"ability": "math", "index": 0, "split": "train", "family": "sum"}
    expected = f"<|im_start|>user\n{first.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(list(first.token_ids)) == expected


def test_globs_fallback_ids_and_numeric_answers(tmp_path, tokenizer):
    write(tmp_path / "b.parquet", [row(), row(reward_model={"ground_truth": 7, "style": "rule"})][1:])
    write(tmp_path / "a.parquet", [row(), row("Another?")])
    prompts = load_prompts([str(tmp_path / "*.parquet")], tokenizer, PromptRules(64))
    assert [prompt.id for prompt in prompts] == ["a/0", "a/1", "b/0"]
    assert prompts[2].answer == "7"
    assert prompts[0].messages == ({"role": "user", "content": "What is 1+1?"},)


def test_names_are_printable(tmp_path, tokenizer):
    name = "a\x1b]0;PWN\x07\u202eb"
    named = row(id=name, data_source=name)
    first, second = load_prompts(
        [write(tmp_path / "x\x1b.parquet", [named, row("Another?")])], tokenizer, PromptRules(64)
    )
    assert first.id == first.data_source == r"a\x1b]0;PWN\x07\u202eb"
    assert second.id == r"x\x1b/1"


def test_tool_schema_reaches_the_template(tmp_path, tokenizer):
    file = write(tmp_path / "a.parquet", [row()])
    schema = {"type": "function", "function": {"name": "code_interpreter"}}
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ tools | tojson }}" + tokenizer.chat_template
    (prompt,) = load_prompts([file], other, PromptRules(400, tool_schemas=[schema]))
    assert "code_interpreter" in tokenizer.decode(list(prompt.token_ids))


def test_missing_file_says_what_is_there(toolmath, tokenizer):
    message = errors([toolmath / "trian.parquet", toolmath / "no*.parquet"], tokenizer)
    assert f"no such file: {toolmath / 'trian.parquet'}" in message
    assert f"{toolmath} holds train.parquet" in message
    assert f"no file matches {toolmath / 'no*.parquet'}" in message
    assert "2 problems" in message


def test_missing_folder_names_the_nearest_one(tmp_path, tokenizer):
    assert f"{tmp_path} holds no parquet file" in errors([tmp_path / "x" / "y" / "z.parquet"], tokenizer)


def test_missing_column_names_the_nearest(tmp_path, tokenizer):
    rows = [{"data_source": "unit", "prompts": row()["prompt"], "reward_model": {"ground_truth": "1"}}]
    message = errors([write(tmp_path / "a.parquet", rows)], tokenizer)
    assert "no column 'prompt'; the columns are data_source, prompts, reward_model; did you mean 'prompts'?" in message


def test_not_a_parquet_file(tmp_path, tokenizer):
    (tmp_path / "a.parquet").write_text("hello")
    assert "not a readable parquet file" in errors([tmp_path / "a.parquet"], tokenizer)


def test_all_bad_rows_are_reported_at_once(tmp_path, tokenizer):
    message_type = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", message_type),
            ("reward_model", pa.struct([("ground_truth", pa.string())])),
        ]
    )
    rows = [
        row(reward_model={"ground_truth": " "}),
        row(reward_model={"ground_truth": None}),
        row(data_source=""),
        row(prompt=[]),
        row(prompt=[{"role": "human", "content": "x"}]),
        row(prompt=[{"role": "user", "content": None}]),
        row(prompt=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]),
        row("7 " * 80),
        row(reward_model=None, data_source=None),
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "a.parquet")
    message = errors([tmp_path / "a.parquet"], tokenizer)
    expected = [
        "row 0 column 'reward_model': the answer in 'ground_truth' is empty",
        "row 1 column 'reward_model': 'ground_truth' must be a text or a number, not NoneType",
        "row 2 column 'data_source': expected a non-empty text (value: '')",
        "row 3 column 'prompt': expected a non-empty list of {role, content} (value: [])",
        "row 4 column 'prompt': message 0 has role 'human', expected one of system, user, assistant, tool",
        "row 5 column 'prompt': message 0 has no text in 'content'",
        "row 6 column 'prompt': ends with an assistant message",
        "tokens, limit 64: raise data.max_prompt_tokens, and rollout.engine.max_model_len",
        "row 8 column 'data_source': expected a non-empty text (value: None)",
        "row 8 column 'reward_model': expected a record with the field 'ground_truth'",
    ]
    assert "10 problems" in message
    for line in expected:
        assert line in message
    assert "row 7 column 'prompt': 16" in message  # the token count


def test_only_the_first_twenty_problems_are_listed(tmp_path, tokenizer):
    message = errors([write(tmp_path / "a.parquet", [row(data_source="") for _ in range(33)])], tokenizer)
    assert message.startswith("33 problems")
    assert message.endswith("... and 13 more")
    assert message.count("\n") == 21


def test_prompt_of_plain_text_and_unknown_message_fields(tmp_path, tokenizer):
    text = write(tmp_path / "a.parquet", [row(prompt="What is 1+1?")])
    named = write(tmp_path / "b.parquet", [row(prompt=[{"role": "user", "content": "x", "name": "bob"}])])
    message = errors([text, named], tokenizer)
    assert "column 'prompt': expected a non-empty list of {role, content} (value: 'What is 1+1?')" in message
    assert "message 0 has fields that are not supported: name" in message


def test_duplicate_ids(tmp_path, tokenizer):
    first = write(tmp_path / "a.parquet", [row(id="x")])
    second = write(tmp_path / "b.parquet", [row(id="y"), row(id="x")])
    assert f"{second} row 1 column 'id': already used by {first} row 0" in errors([first, second], tokenizer)


def test_a_template_that_refuses_is_a_problem_of_the_row(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}, {"role": "user", "content": "z"}]
    message = errors([write(tmp_path / "a.parquet", [row(prompt=messages)])], tokenizer)
    assert "row 0 column 'prompt': the chat template refuses it: a system message must come first" in message


def test_no_rows(tmp_path, tokenizer):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), file)
    assert "no prompts in" in errors([file], tokenizer)


def test_reading_prompts_does_not_import_torch():
    code = (
        "import sys\n"
        "from ctpo_megatron.data import read_conversations, read_prompts\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=scaled(60)).returncode == 0


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(str(index), "unit", (), "1", ()) for index in range(count)]


def _ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_each_epoch_visits_every_prompt_once_in_another_order():
    sampler = PromptSampler(_prompts(10), seed=3)
    first, second = _ids(sampler.take(10)), _ids(sampler.take(10))
    assert sorted(first) == sorted(second) == sorted(_ids(_prompts(10)))
    assert first != second
    assert _ids(PromptSampler(_prompts(10), seed=3).take(10)) == first
    assert _ids(PromptSampler(_prompts(10), seed=4).take(10)) != first
    assert _ids(PromptSampler(_prompts(4), seed=0, shuffle=False).take(6)) == ["0", "1", "2", "3", "0", "1"]


@pytest.mark.parametrize("taken", [0, 3, 10, 17, 20])
def test_sampler_resumes_where_it_stopped(taken):
    original = PromptSampler(_prompts(10), seed=5)
    original.take(taken)
    state = original.state_dict()
    resumed = PromptSampler(_prompts(10), seed=5)
    resumed.load_state_dict(state)
    assert state["consumed"] == _ids(PromptSampler(_prompts(10), seed=5).take(taken))[taken - state["cursor"] :]
    assert _ids(resumed.take(25)) == _ids(original.take(25))


def test_sampler_refuses_states_that_cannot_be_its_own():
    sampler = PromptSampler(_prompts(10), seed=5)
    with pytest.raises(ValueError, match="used seed 6, this run uses seed 5"):
        sampler.load_state_dict({"epoch": 0, "cursor": 0, "seed": 6, "consumed": []})
    with pytest.raises(ValueError, match="there are 10 prompts"):
        sampler.load_state_dict({"epoch": 0, "cursor": 11, "seed": 5, "consumed": []})
    original = PromptSampler(_prompts(10), seed=5)
    original.take(3)
    with pytest.raises(ValueError, match=r"prompt 1 of epoch 0 was '\d', these data give '\d'.*data\.shuffle"):
        PromptSampler(_prompts(10), seed=5, shuffle=False).load_state_dict(original.state_dict())
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptSampler([], seed=0)


def test_sampler_refuses_other_prompts_under_the_same_ids():
    ours = _prompts(10)
    original = PromptSampler(ours, seed=5)
    begun = original.state_dict()
    original.take(3)
    state = original.state_dict()
    # The last one of the epoch: it was not taken yet.
    untaken = original.take(7)[-1]
    for change in ({"answer": "2"}, {"token_ids": (7,)}):
        changed = [replace(prompt, **change) if prompt is untaken else prompt for prompt in ours]
        with pytest.raises(ValueError, match=r"other tokens or answers under the same ids.*data\.train"):
            PromptSampler(changed, seed=5).load_state_dict(state)
        PromptSampler(changed, seed=5).load_state_dict(begun)
    PromptSampler(_prompts(10), seed=5).load_state_dict(state)
