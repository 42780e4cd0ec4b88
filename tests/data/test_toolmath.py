"""What examples/toolmath writes: content, determinism, reuse, and a standard Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from examples.toolmath import Task, TaskError, write_task
from examples.toolmath.__main__ import main
from examples.toolmath.conversations import hermes
from tests.support.task import SMALL_TASK


def small(**changes: Any) -> Task:
    return Task(**(dict(setting.split("=") for setting in SMALL_TASK) | changes))


def _questions(path) -> list[str]:
    return [row[0]["content"] for row in pq.read_table(path)["prompt"].to_pylist()]


def test_splits_do_not_overlap(toolmath):
    train, heldout = _questions(toolmath / "train.parquet"), _questions(toolmath / "heldout.parquet")
    sft = [row[0]["content"] for row in pq.read_table(toolmath / "sft.parquet")["messages"].to_pylist()]
    assert (len(set(train)), len(set(heldout)), len(sft)) == (64, 16, 640) == (len(train), len(heldout), len(sft))
    assert not set(heldout) & (set(train) | set(sft))
    rows = pq.read_table(toolmath / "train.parquet").to_pylist()
    assert rows[0].keys() == {"id", "data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert len({row["extra_info"]["family"] for row in rows}) == 14
    assert all(row["reward_model"]["ground_truth"].isdigit() for row in rows)


def test_same_seed_same_files_other_seed_other_files(toolmath, tmp_path):
    from safetensors.torch import load_file

    assert write_task(small(), tmp_path / "same")
    assert write_task(small(seed=1), tmp_path / "other")
    for name in ("train", "heldout", "sft"):
        table = pq.read_table(toolmath / f"{name}.parquet")
        assert table.equals(pq.read_table(tmp_path / "same" / f"{name}.parquet"))
        assert not table.equals(pq.read_table(tmp_path / "other" / f"{name}.parquet"))
    weights, same, other = (
        load_file(path / "model" / "model.safetensors") for path in (toolmath, tmp_path / "same", tmp_path / "other")
    )
    assert weights.keys() == same.keys()
    assert all(weights[key].equal(same[key]) for key in weights)
    assert not weights["model.embed_tokens.weight"].equal(other["model.embed_tokens.weight"])
    tokenizers = [(path / "model" / "tokenizer.json").read_text() for path in (toolmath, tmp_path / "same")]
    assert tokenizers[0] == tokenizers[1]


def test_an_equal_directory_is_reused_and_another_one_refused(toolmath):
    before = (toolmath / "train.parquet").stat().st_mtime_ns
    assert not write_task(small(), toolmath)
    assert (toolmath / "train.parquet").stat().st_mtime_ns == before
    with pytest.raises(TaskError, match=r"seed is 0, not 7") as caught:
        write_task(small(seed=7, corruption={"guess": 0.5}, tool_parser="fenced"), toolmath)
    assert "corruption.guess is 0.15, not 0.5; " in str(caught.value)
    assert "tool_parser is hermes, not fenced. Delete it" in str(caught.value)


def test_a_foreign_directory_is_never_touched(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(TaskError, match="holds no task"):
        write_task(small(), tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["corruption.wrong_common=0.7", "corruption.wrong_rare=0.7"], "wrong_common + wrong_rare must not exceed 1"),
        (["seed=x", "model.layers=2"], "seed: Input should be a valid integer"),
        (["seed=x", "model.layers=2"], "model.layers: Extra inputs are not permitted, not 2"),
        (["seed"], "'seed' is no KEY=VALUE"),
        (["seed=7"], "seed is 0, not 7"),
    ],
)
def test_wrong_settings_are_refused(toolmath, tmp_path, monkeypatch, capsys, settings, message):
    directory = toolmath if settings == ["seed=7"] else tmp_path / "bad"
    monkeypatch.setattr("sys.argv", ["toolmath", str(directory), *SMALL_TASK, *settings])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not list(Path(tmp_path).iterdir())


def test_the_model_directory_is_standard(toolmath, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(toolmath / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    shape = small().model
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (shape.hidden_size, shape.num_layers)
    assert (model.config.head_dim, model.config.rope_parameters["rope_theta"]) == (shape.head_dim, shape.rope_theta)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(shape.initializer_range, rel=0.02)
    assert model.config.vocab_size == 512 >= len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert json.loads((toolmath / "model" / "config.json").read_text())["tie_word_embeddings"] is True


def test_tokens_are_digits_tags_and_pieces_of_any_text(tokenizer):
    assert tokenizer.tokenize("print(9041)")[-5:-1] == list("9041")
    for tag in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer(tag, add_special_tokens=False)["input_ids"]) == 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) <= 512
    for text in ("12345 + 0", "a\n\n b\t{}\\boxed{7}.", "naïve – ✓ 漢字", "<tool_call>\n{}\n</tool_call>"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_renders_roles(tokenizer):
    turns = (("system", "Be brief."), ("user", "q"), ("assistant", "c"), ("tool", "1"), ("tool", "2"))
    messages = [{"role": role, "content": text} for role, text in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tools = [{"type": "function", "function": {"name": "code_interpreter"}}]
    alone = tokenizer.apply_chat_template(messages[1:2], tools=tools, tokenize=False)
    assert alone == "<|im_start|>user\nq<|im_end|>\n"


@pytest.mark.parametrize("arguments", [{"code": "print(1<2)"}, '{"code": "print(1<2)"}'])
def test_calls_of_a_client_are_rendered_as_they_were_taught(tokenizer, arguments):
    said, answered = hermes("print(1<2)", "True")
    function = {"name": "code_interpreter", "arguments": arguments}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    answer = {"role": "tool", "tool_call_id": "a", "content": "True"}
    client, taught = (
        tokenizer.apply_chat_template([{"role": "user", "content": "q"}, *turns], tokenize=False)
        for turns in ((call, answer), (said, answered))
    )
    assert client == taught
    with_prose = tokenizer.apply_chat_template([{**call, "content": "So:"}], tokenize=False)
    assert with_prose == f"<|im_start|>assistant\nSo:\n{said['content']}<|im_end|>\n"
