"""The prompt reader's schema, its error messages, and the resumable sampler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ctpo_megatron.data import DataError, Prompt, PromptRules, PromptSampler
from tests.data.rows import row, write
from tests.support.prompts import load_prompts


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
    write(tmp_path / "b.parquet", row(reward_model={"ground_truth": 7, "style": "rule"}))
    write(tmp_path / "a.parquet", row(), row("Another?"))
    prompts = load_prompts([str(tmp_path / "*.parquet")], tokenizer, PromptRules(64))
    assert [(prompt.id, prompt.answer) for prompt in prompts] == [("a/0", "2"), ("a/1", "2"), ("b/0", "7")]
    assert prompts[0].messages == ({"role": "user", "content": "1+1?"},)


def test_names_are_printable(tmp_path, tokenizer):
    name = "a\x1b]0;PWN\x07\u202eb"
    file = write(tmp_path / "x\x1b.parquet", row(id=name, data_source=name), row(id=None))
    first, second = load_prompts([file], tokenizer, PromptRules(64))
    assert first.id == first.data_source == r"a\x1b]0;PWN\x07\u202eb"
    assert second.id == r"x\x1b/1"


def test_missing_file_says_what_is_there(toolmath, tmp_path, tokenizer):
    missing, pattern, deep = toolmath / "trian.parquet", toolmath / "no*.parquet", tmp_path / "x" / "y" / "z.parquet"
    message = errors([missing, pattern, deep], tokenizer)
    for line in (
        f"no such file: {missing}",
        f"{toolmath} holds train.parquet",
        f"no file matches {pattern}",
        f"{tmp_path} holds no parquet file",
        "3 problems",
    ):
        assert line in message


def test_only_the_first_twenty_problems_are_listed(tmp_path, tokenizer):
    message = errors([write(tmp_path / "a.parquet", *(row(data_source="") for _ in range(33)))], tokenizer)
    assert message.startswith("33 problems")
    assert message.endswith("... and 13 more")
    assert message.count("\n") == 21


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
