"""Bad data files: every case has a message that names file, row and what to do; nothing of it is accepted silently."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ctpo_megatron.data import DataError, PromptRules
from tests.data.rows import row, write
from tests.support.prompts import load_conversations, load_prompts

CALL = {"type": "function", "id": "c1", "function": {"name": "code_interpreter", "arguments": {"code": "print(1)"}}}
USER, TOOL = {"role": "user", "content": "1+1?"}, {"role": "tool", "content": "2", "tool_call_id": "c1"}


def rows(*cells: dict[str, Any]) -> Callable[[Path], list[str]]:
    """A file of JSON lines with these rows: it keeps types apart that one parquet column cannot hold."""

    return lambda folder: [write(folder / "a.jsonl", *cells)]


def prompt(*messages: Any) -> Callable[[Path], list[str]]:
    return rows(row(prompt=list(messages)))


def file(name: str, content: str | bytes) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return [str(folder / name)]

    return make


def truncated(folder: Path) -> list[str]:
    whole = Path(write(folder / "a.parquet", row()))
    whole.write_bytes(whole.read_bytes()[:-20])
    return [str(whole)]


def saved(folder: Path, state: str) -> list[str]:
    (folder / "state.json").write_text(state)
    return [str(folder)]


def shards(*names: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        for name in names:
            write(folder / name, row())
        return [str(folder)]

    return make


def gsm8k(folder: Path) -> list[str]:
    return [write(folder / "a.parquet", {"question": "1+1?", "answer": "2 #### 2"})]


ONE_ROW = json.dumps(row()) + "\n"
PROMPTS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    # Files.
    "an empty folder": (lambda f: [str(f)], "a folder without data files"),
    "splits in one folder": (shards("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"), "test-*.parquet"),
    "a train and a test file in one folder": (shards("train.parquet", "test.parquet"), "/train.parquet"),
    "a test file among shards": (shards("train-00000-of-00001.parquet", "gsm8k_test.parquet"), "/gsm8k_test.parquet"),
    "splits of several data sets": (
        shards("gsm8k_train.parquet", "math.validation.parquet"),
        "/math.validation.parquet",
    ),
    "shards of several names": (shards("train-00000-of-00001.parquet", "b-00000-of-00001.parquet"), "/b-*.parquet"),
    "a held-out file that a pattern matches": (
        lambda f: [shards("Train.parquet", "Held-Out.parquet")(f)[0] + "/*.parquet"],
        "matches several splits; name the files, or one split: ",
    ),
    "folders of splits that a pattern matches": (
        lambda f: [*file("dev/a.jsonl", "")(f)[1:], *file("train/a.jsonl", "")(f)[1:], str(f / "**" / "*.jsonl")],
        "train/a.jsonl",
    ),
    "two kinds of files in one folder": (
        lambda f: [str(f), *file("a.jsonl", "")(f)[1:], *file("b.parquet", "")(f)[1:]],
        "/*.parquet",
    ),
    "a file and its archive in one folder": (
        lambda f: [str(f), *file("a.jsonl", "")(f)[1:], *file("a.jsonl.gz", "")(f)[1:]],
        "holds files of several kinds; name one: ",
    ),
    "a saved dictionary of splits": (
        lambda f: [str(Path(file("dataset_dict.json", '{"splits": ["train"]}')(f)[0]).parent)],
        "holds several splits",
    ),
    "a saved data set without its list of files": (lambda f: saved(f, "{}"), "state.json does not name its data files"),
    "a saved data set that lost a file": (
        lambda f: saved(f, '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'),
        "data-00000-of-00001.arrow: not a readable Arrow file",
    ),
    "a file given twice": (lambda f: rows(row())(f) * 2, "a.jsonl: given twice"),
    "no row at all": (file("a.jsonl", ""), "no prompts in "),
    "an empty parquet file": (file("a.parquet", ""), "it is empty: 0 bytes"),
    "a truncated parquet file": (truncated, "not a readable parquet file"),
    "text under a parquet name": (file("a.parquet", "hello, world"), "not a readable parquet file"),
    "CSV": (file("a.csv", "problem,answer\n1+1,2\n"), "pandas.read_csv(FILE).to_json("),
    "TSV": (file("a.tsv", "problem\tanswer\n"), "sep='\\t'"),
    "a spreadsheet": (file("a.xlsx", "PK"), "pandas.read_excel(FILE)"),
    "JSON lines that are not JSON": (
        file("a.jsonl", ONE_ROW + "{'id': 1}\n"),
        "a.jsonl: not a readable JSON file (line 2",
    ),
    "JSON lines cut in the middle": (file("a.jsonl", ONE_ROW + ONE_ROW[:30]), "line 2: "),
    "an archive cut in the middle": (
        file("a.jsonl.gz", gzip.compress(ONE_ROW.encode() * 100)[:-30]),
        "a.jsonl.gz: not a readable JSON file (",
    ),
    "an archive with a wrong bit": (
        file("a.jsonl.zst", pa.Codec("zstd").compress(ONE_ROW.encode(), asbytes=True).replace(b"\x28", b"\x29", 1)),
        "a.jsonl.zst: not a readable JSON file (",
    ),
    "lines that are packed, and not JSON": (
        file("a.jsonl.gz", gzip.compress((ONE_ROW + "{'id': 1}\n").encode())),
        "a.jsonl.gz: not a readable JSON file (line 2",
    ),
    "a row that is packed": (
        file("a.ndjson.gz", gzip.compress((ONE_ROW + json.dumps(row(data_source=""))).encode())),
        "a.ndjson.gz row 1 column 'data_source': expected a non-empty text",
    ),
    "CSV that is packed": (file("a.csv.gz", gzip.compress(b"problem,answer\n")), "pandas.read_csv(FILE).to_json("),
    "a JSON list that is not closed": (file("a.json", "[" + ONE_ROW), "not a readable JSON file (line"),
    "JSON lines in another encoding": (file("a.jsonl", ONE_ROW.replace("1+1", "é").encode("latin-1")), "utf-8"),
    "a line that is no object": (file("a.jsonl", ONE_ROW + "[1, 2]\n"), "row 1: expected a JSON object, not list"),
    "lists of messages": (
        file("a.json", '[[{"from": "human", "value": "1+1?"}]]'),
        'since a row is no object; write each as {"data_source": ..., "prompt": ..., "reward_model": ...}',
    ),
    # Columns.
    "columns of GSM8K": (gsm8k, """"ground_truth": row['answer'].rpartition("####")[2].strip()"""),
    "columns of DeepScaleR": (
        rows({"problem": "1+1?", "answer": "2", "solution": "."}),
        """"ground_truth": row['answer']}""",
    ),
    "a column misspelt": (rows({"data_source": "u", "prompts": [], "reward_model": {}}), "did you mean 'prompts'?"),
    # Cells.
    "a prompt as text": (rows(row(prompt="1+1?")), "expected a non-empty list of {role, content} (value: '1+1?')"),
    "a prompt as JSON text": (rows(row(prompt=json.dumps([USER]))), "expected a non-empty list of {role, content}"),
    "an empty prompt": (rows(row(prompt=[])), "expected a non-empty list of {role, content}"),
    "a prompt of empty messages": (prompt({"role": "user", "content": " "}), "has only empty messages"),
    "a message that is a text": (prompt("1+1?"), "message 0 is not a {role, content} record"),
    "ShareGPT's names": (prompt({"from": "human", "value": "x"}), "message 0 has role None"),
    "a role that does not exist": (prompt({"role": "human", "content": "x"}), "message 0 has role 'human'"),
    "content in parts": (prompt({"role": "user", "content": [{"type": "text", "text": "x"}]}), "a list of parts"),
    "content that is null": (prompt({"role": "user", "content": None}), "message 0 has no text in 'content'"),
    "a field that no template shows": (prompt(USER | {"weight": 1}), "not supported: weight"),
    "a prompt that is answered": (
        prompt(USER, {"role": "assistant", "content": "2"}),
        "ends with an assistant message",
    ),
    "a call by a user": (prompt(USER | {"tool_calls": [CALL]}), "not supported: tool_calls"),
    "calls that are no list": (
        prompt(USER, {"role": "assistant", "content": "", "tool_calls": CALL}, TOOL),
        "message 1 has 'tool_calls' that are no list",
    ),
    "a call without a function": (
        prompt(USER, {"role": "assistant", "tool_calls": [{"id": "c1"}]}, TOOL),
        "message 1 has a call 0 without function",
    ),
    "arguments that are no object": (
        prompt(USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}, TOOL),
        "message 1 has a call 0 whose arguments are no JSON object",
    ),
    "an answer to a call that was not made": (
        prompt(USER, {"role": "assistant", "tool_calls": [CALL]}, TOOL | {"tool_call_id": "c2"}),
        "message 2 answers the call 'c2', which no message before it makes",
    ),
    "tools that are no schemas": (rows(row(tools=[{"name": "f"}])), "column 'tools': tool 0 is no schema"),
    "tools that are no list": (rows(row(tools="python")), "expected a list of function schemas, or its JSON text"),
    "a system message that comes late": (
        prompt(USER, {"role": "system", "content": "x"}, USER),
        "refuses it: a system",
    ),
    "a longer prompt than allowed": (prompt({"role": "user", "content": "7 " * 80}), "or set data.overlong: drop"),
    "no source": (rows(row(data_source="")), "column 'data_source': expected a non-empty text"),
    "a source that is a number": (
        rows(row(data_source=3)),
        "column 'data_source': expected a non-empty text (value: 3)",
    ),
    "no ground truth": (rows(row(reward_model={"style": "rule"})), "expected a record with the field 'ground_truth'"),
    "a ground truth that is null": (rows(row(reward_model={"ground_truth": None})), "not NoneType"),
    "a ground truth that is empty": (rows(row(reward_model={"ground_truth": " "})), "'ground_truth' is empty"),
    "a ground truth that is a list": (rows(row(reward_model={"ground_truth": ["2"]})), "not list"),
    "a ground truth that is true": (rows(row(reward_model={"ground_truth": True})), "not bool"),
    "an id that is empty": (rows(row(id=" ")), "column 'id': expected a text or an integer"),
    "an id that is true": (rows(row(id=True)), "column 'id': expected a text or an integer"),
    "an id that is a fraction": (rows(row(id=1.5)), "column 'id': expected a text or an integer"),
    "extra_info that is a text": (rows(row(extra_info="x")), "column 'extra_info': expected a record"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(case: str, tmp_path: Path, tokenizer) -> None:
    make, message = PROMPTS[case]
    with pytest.raises(DataError) as caught:
        load_prompts(make(tmp_path), tokenizer, PromptRules(64))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


SAID = {"role": "assistant", "content": "2"}
CONVERSATIONS: dict[str, tuple[Any, str]] = {
    "no conversation": (None, "no conversations in "),
    "a conversation that nobody answers": ({"messages": [USER]}, "must end with an assistant message"),
    "an empty conversation": ({"messages": []}, "row 0 column 'messages': expected a non-empty list"),
    "a role that does not exist": ({"messages": [USER | {"role": "x"}, SAID]}, "message 0 has role 'x'"),
    "another column": ({"conversations": [USER, SAID]}, "no column 'messages'; the columns are conversations"),
    "tools that are no schemas": ({"messages": [USER, SAID], "tools": [{"type": "function"}]}, "tool 0 is no schema"),
    "an answer to nobody's call": (
        {"messages": [USER, SAID | {"tool_calls": [CALL]}, TOOL | {"tool_call_id": "c9"}, SAID]},
        "message 2 answers the call 'c9'",
    ),
}


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_conversations(case: str, tmp_path: Path, tokenizer) -> None:
    cells, message = CONVERSATIONS[case]
    with pytest.raises(DataError) as caught:
        load_conversations(rows(*([cells] if cells else []))(tmp_path), tokenizer)
    assert message in str(caught.value)
