"""The same rows from every kind of file, OpenAI's conversations, ids of evaluation files, rows that are left out."""

from __future__ import annotations

import bz2
import gzip
import json
from copy import deepcopy
from pathlib import Path

import pyarrow as pa
import pytest

from ctpo_megatron.data import DataError, PromptRules, read_prompts
from tests.data.rows import row, write
from tests.support.prompts import load_conversations, load_prompts

SAVED = Path(__file__).parent / "saved_dataset"
"""Two rows, written by `save_to_disk` of the library `datasets`."""
RULES = PromptRules(400)
# Shows tools and calls as Qwen's templates do.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def openai(tokenizer):
    """A tokenizer whose template shows tools and calls."""
    other = deepcopy(tokenizer)
    other.chat_template = TEMPLATE
    return other


def test_every_kind_of_file_holds_the_same(tmp_path: Path, tokenizer) -> None:
    rows = [row("1+1?", id="a", extra_info=None), row("2+0?", id="b", extra_info={"index": 1})]
    listed, lines = tmp_path / "list.json", Path(write(tmp_path / "a.jsonl", *rows))
    listed.write_text(json.dumps(rows))
    lines.write_text(lines.read_text() + "\n")
    write(tmp_path / "snapshot" / "train-00000-of-00002.parquet", rows[0])
    write(tmp_path / "snapshot" / "train-00001-of-00002.parquet", rows[1])
    (tmp_path / "snapshot" / "README.md").write_text("# card")
    expected = load_prompts([write(tmp_path / "a.parquet", *rows)], tokenizer, RULES)
    assert [(each.id, each.answer, each.extra) for each in expected] == [("a", "2", {}), ("b", "2", {"index": 1})]
    for place in (lines, listed, tmp_path / "snapshot", SAVED):
        assert load_prompts([str(place)], tokenizer, RULES) == expected, place


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda text: pa.Codec("zstd").compress(text, asbytes=True)}


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
@pytest.mark.parametrize("packed", PACK)
def test_packed_json_is_read_as_json(tmp_path: Path, tokenizer, suffix: str, packed: str) -> None:
    plain = Path(write(tmp_path / f"a{suffix}", row("1+1?"), row("2+0?\r")))
    expected = load_prompts([str(plain)], tokenizer, RULES)
    assert [prompt.id for prompt in expected] == ["a/0", "a/1"]
    file = tmp_path / "packed" / f"a{suffix}{packed}"
    file.parent.mkdir()
    text = plain.read_bytes()
    members = text.splitlines(keepends=True) if packed == ".gz" else [text]  # which are one text
    file.write_bytes(b"".join(map(PACK[packed], members)))
    for given in (file, *([file.parent] if suffix != ".json" else [])):
        assert load_prompts([str(given)], tokenizer, RULES) == expected


@pytest.mark.parametrize("pattern", ["*.jsonl", "**/*.jsonl", "a.j*"])
def test_brackets_of_a_folder_are_its_name(tmp_path: Path, tokenizer, pattern: str) -> None:
    write(tmp_path / "br[1]ckets" / "a.jsonl", row())
    write(tmp_path / "br1ckets" / "b.jsonl", row("other"))
    (prompt,) = load_prompts([str(tmp_path / "br[1]ckets" / pattern)], tokenizer, RULES)
    assert prompt.id == "a/0"
    (prompt,) = load_prompts([str(tmp_path / "br[0-9]ck*" / "*.jsonl")], tokenizer, RULES)
    assert prompt.id == "b/0"


@pytest.mark.parametrize(
    "names",
    [
        ("train", "extra"),
        ("train_a", "train_b"),
        ("contest", "train"),
        ("test_of_time_train", "train"),
        ("latest", "retrain", "validate"),
        ("gsm8k_test", "math_test", "aime24"),
    ],
    ids=", ".join,
)
def test_files_of_one_split_are_read_together(tmp_path: Path, tokenizer, names: tuple[str, ...]) -> None:
    folder = tmp_path / "test"
    for number, name in enumerate(names):
        write(folder / f"{name}.parquet", row(id=str(number)))
    (folder / "dataset_infos.json").write_text("{}")
    for given in (folder, folder / "*.parquet"):
        assert len(load_prompts([str(given)], tokenizer, RULES)) == len(names)


def test_json_lines_end_at_line_feeds_alone(tmp_path: Path, tokenizer) -> None:
    said = "1\u2028+\u0085 1\x1c?"
    lines = [json.dumps(row(text, id=text), ensure_ascii=False) for text in (said, "2")]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    prompts = load_prompts([str(tmp_path / "a.jsonl")], tokenizer, RULES)
    shown = r"1\u2028+\x85 1\x1c?"
    assert [(prompt.id, prompt.messages[0]["content"]) for prompt in prompts] == [(shown, said), ("2", "2")]


def test_halves_of_characters_are_refused(tmp_path: Path, tokenizer) -> None:
    rows = [row("\U0001f600"), row("\ud83d"), row(id="\ude00")]
    with pytest.raises(DataError) as told:
        load_prompts([write(tmp_path / "a.jsonl", *rows)], tokenizer, RULES)
    assert "2 problems" in str(told.value)
    assert "row 1 column 'prompt': holds half of a character" in str(told.value)
    assert r"row 2 column 'id': holds half of a character (\ud800 to \udfff) (value: '\ude00')" in str(told.value)


def test_calls_may_be_numbered(tmp_path: Path, openai) -> None:
    call = {"id": 7, "type": "function", "function": {"name": "python", "arguments": {"code": "1"}}}
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for answered in (7, "7"):
        messages = [*asked, {"role": "tool", "tool_call_id": answered, "content": "1"}]
        load_prompts([write(tmp_path / "a.jsonl", row(prompt=messages))], openai, RULES)
    messages = [*asked, {"role": "tool", "tool_call_id": [7], "content": "1"}]
    with pytest.raises(DataError, match=r"message 2 answers the call \[7\], which no message before it makes"):
        load_prompts([write(tmp_path / "a.jsonl", row(prompt=messages))], openai, RULES)


def test_tools_that_are_no_json_are_refused(tmp_path: Path, openai) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": b"d"}}]
    with pytest.raises(DataError, match="row 0 column 'tools': cannot be written as JSON: Object of type bytes"):
        load_prompts([write(tmp_path / "a.parquet", row(tools=tools))], openai, RULES)


@pytest.mark.parametrize("arguments", [{"code": "print(1+1)"}, '{"code": "print(1+1)"}'])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_openai_conversations_are_rendered_by_the_template(tmp_path: Path, openai, arguments, suffix: str) -> None:
    schema = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": arguments}}
    talk = [
        {"role": "user", "content": "1+1?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "\\boxed{2}"},
    ]
    shown = (
        '{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}\n'
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>{"name": "run", "arguments": {"code": "print(1+1)"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )
    cells = {"messages": talk, "tools": json.dumps([schema])}
    (record,) = load_conversations([write(tmp_path / f"sft.{suffix}", cells)], openai)
    assert openai.decode(record.token_ids) == shown + "\\boxed{2}<|im_end|>"
    said = [token for token, mask in zip(record.token_ids, record.loss_mask, strict=True) if mask]
    assert openai.decode(said).count("<|im_end|>") == 2
    file = write(tmp_path / f"train.{suffix}", row(prompt=talk[:3], tools=[schema]))
    (prompt,) = load_prompts([file], openai, RULES)
    assert openai.decode(list(prompt.token_ids)) == shown


def test_a_template_that_drops_calls_is_refused(tmp_path: Path, openai) -> None:
    openai.chat_template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    call = {"function": {"name": "run", "arguments": {}}}
    talk = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    with pytest.raises(DataError, match=r"row 0 column 'prompt': .* does not show the calls in `tool_calls`: run"):
        load_prompts([write(tmp_path / "a.jsonl", row(prompt=talk))], openai, RULES)
    file = write(tmp_path / "b.jsonl", {"messages": [*talk, {"role": "assistant", "content": "2"}]})
    with pytest.raises(DataError, match=r"row 0 .* does not show the calls of message 1 in `tool_calls`: run"):
        load_conversations([file], openai)


def test_the_tools_of_a_row_take_the_place_of_the_configured(tmp_path: Path, openai) -> None:
    ours, theirs = ({"type": "function", "function": {"name": name}} for name in ("code_interpreter", "search"))
    file = write(tmp_path / "a.jsonl", row(tools=[theirs]), row("x", tools=None))
    prompts = load_prompts([file], openai, PromptRules(400, tool_schemas=[ours]))
    texts = [openai.decode(list(prompt.token_ids)) for prompt in prompts]
    assert [("search" in text, "code_interpreter" in text) for text in texts] == [(True, False), (False, True)]


def test_evaluation_files_may_share_ids(tmp_path: Path, tokenizer) -> None:
    new, old = write(tmp_path / "aime25.parquet", row(id=0), row("x", id=1)), write(tmp_path / "old.parquet", row(id=0))
    folders = [write(tmp_path / name / "test.parquet", row(id=0)) for name in ("aime24", "aime24_old")]
    held_out = PromptRules(400, held_out=True)
    for files, names in (
        ([new], ["0", "1"]),
        ([new, old], ["aime25/0", "aime25/1", "old/0"]),
        (folders, ["aime24/test/0", "aime24_old/test/0"]),
    ):
        assert [prompt.id for prompt in load_prompts(files, tokenizer, held_out)] == names
    twice = write(tmp_path / "b.parquet", row(id=0), row(id=0))
    for files, rules in (([new, old], RULES), ([twice], held_out)):
        with pytest.raises(DataError, match="already used by"):
            load_prompts(files, tokenizer, rules)


def test_of_many_rows_with_one_fault_some_are_shown(tmp_path: Path, tokenizer) -> None:
    file = write(tmp_path / "a.parquet", *(row("7 " * 80) for _ in range(12)))
    with pytest.raises(DataError) as caught:
        load_prompts([file], tokenizer, PromptRules(64))
    assert str(caught.value).count("limit 64") == 5
    assert "7 more rows with such a 'prompt', 12 in all" in str(caught.value)


def test_a_limit_reads_the_beginning_of_each_file(tmp_path: Path, tokenizer) -> None:
    files = [write(tmp_path / name, *(row(str(i)) for i in range(5))) for name in ("a.parquet", "b.jsonl")]
    found = read_prompts(files, tokenizer, PromptRules(64, limit=2))
    assert [prompt.id for prompt in found.prompts] == ["a/0", "a/1", "b/0", "b/1"]
    assert sum(found.rows.values()) == 10
