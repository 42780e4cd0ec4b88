"""A file with other columns is refused with lines of Python that make ours; they run with pyarrow alone."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ctpo_megatron import cli
from ctpo_megatron.data import DataError, PromptRules
from tests.data.rows import write
from tests.data.test_data_check import own
from tests.support.deadlines import scaled
from tests.support.prompts import load_conversations, load_prompts

__all__ = ["own"]

Rows = list[dict[str, Any]]
USER, SAID = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}


def save(file: Path, rows: Rows) -> None:
    """In the format of its name."""
    if file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif file.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    elif file.suffix == ".gz":
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        write(file, *rows)


def repeated(**cells: Any) -> Rows:
    return [cells] * 3


PROMPTS: dict[str, tuple[str, Rows, list[str]]] = {
    # Name of the file, its rows, and the ground truths in the end.
    "TRL": ("train.jsonl", repeated(prompt="1+1?", answer="2"), ["2"] * 3),
    "TRL, as messages": ("a.parquet", repeated(prompt=[USER], solution="2", question="x"), ["2"] * 3),
    "GSM8K": ("gsm8k.parquet", repeated(question="1+1?", answer="so 2\n#### 2"), ["2"] * 3),
    "a mark in some": (
        "a.jsonl",
        [*repeated(problem="1+1?", answer="2"), {"problem": "x", "answer": "#### 3"}],
        ["2", "2", "2", "#### 3"],
    ),
    "numbers": ("a.parquet", [{"query": "1+1?", "target": n} for n in (2, 10**9 + 7)], ["2", "1000000007"]),
    "numbers and texts": ("a.json", [{"input": "1+1?", "answer": n} for n in (2, "2", 0)], ["2", "2", "0"]),
    "packed": ("a b.jsonl.gz", repeated(problem="1+1?", final_answer="2"), ["2"] * 3),
    "of datasets": ("a.arrow", repeated(question="1+1?", label=2.5), ["2.5"] * 3),
    "rows without an answer": ("a.jsonl", [{"question": "1+1?"}, {"question": "1+1?", "answer": "2"}], ["2"]),
    "verl without a source": ("a.jsonl", repeated(prompt=[USER], reward_model={"ground_truth": "2"}), ["2"] * 3),
    "our other columns stay": ("a.jsonl", [{"id": n, "problem": "1+1?", "answer": "2"} for n in "xy"], ["2"] * 2),
    "a name with quotes": ("it's.jsonl", repeated(prompt="1+1?", answer="2"), ["2"] * 3),
}


def lines_of(message: str) -> str:
    """The lines that a message prints, which must be there once."""
    before, _, lines = message.partition("which has them:\n\n")
    assert "which has them" not in lines and "import" not in before
    return lines.partition("\n\n")[0]


EXECUTE = """
import json, os, sys
for folder, lines in json.load(sys.stdin):
    os.chdir(folder)
    exec(lines, {})
"""


def made(messages: dict[Path, str]) -> list[Path]:
    """Return the file that the lines of each folder's message make, in an interpreter with nothing of ours."""
    programs = [(str(folder), lines_of(message)) for folder, message in messages.items()]
    assert all(len(lines.splitlines()) <= 8 for _, lines in programs)
    done = subprocess.run(
        [sys.executable, "-I", "-c", EXECUTE],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert (done.returncode, done.stderr) == (0, "")
    files = [[*folder.glob("*_[pc][ro][on]*s.parquet")] for folder in messages]
    assert [len(found) for found in files] == [1] * len(messages)
    return [file for (file,) in files]


@pytest.fixture(scope="module")
def prompt_files(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> dict[str, Path]:
    """The converted file of each case."""
    messages: dict[Path, str] = {}
    for name, rows, _ in PROMPTS.values():
        folder = tmp_path_factory.mktemp("prompts")
        save(folder / name, rows)
        with pytest.raises(DataError) as refused:
            load_prompts([str(folder / name)], tokenizer, PromptRules(64))
        messages[folder] = str(refused.value)
    return dict(zip(PROMPTS, made(messages), strict=True))


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(case: str, prompt_files: dict[str, Path], tokenizer) -> None:
    _, rows, truths = PROMPTS[case]
    prompts = load_prompts([str(prompt_files[case])], tokenizer, PromptRules(64))
    assert [prompt.answer for prompt in prompts] == truths
    assert {message["content"] for prompt in prompts for message in prompt.messages} <= {"1+1?", "x"}
    assert {prompt.id for prompt in prompts} >= {row["id"] for row in rows if "id" in row}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "TRL, texts": {"prompt": "1+1?", "completion": "2"},
    "TRL, messages": {"prompt": [USER], "completion": [SAID]},
    "an instruction": {"instruction": "1+1?", "output": "2"},
    "another name": {"conversations": [USER, SAID]},
}


def test_conversations(tmp_path: Path, tokenizer) -> None:
    messages: dict[Path, str] = {}
    for number, cells in enumerate(CONVERSATIONS.values()):
        (folder := tmp_path / str(number)).mkdir()
        write(folder / "sft.jsonl", cells)
        with pytest.raises(DataError) as refused:
            load_conversations([str(folder / "sft.jsonl")], tokenizer)
        messages[folder] = str(refused.value)
    (whole,) = load_conversations([write(tmp_path / "ours.jsonl", {"messages": [USER, SAID]})], tokenizer)
    for case, file in zip(CONVERSATIONS, made(messages), strict=True):
        (found,) = load_conversations([str(file)], tokenizer)
        assert found.token_ids == whole.token_ids, case


@pytest.mark.parametrize("cells", [{"a": 1}, {"prompt": 3, "answer": "2"}, {"question": "x", "answer": ["2"]}])
def test_without_a_question_and_an_answer_there_are_no_lines(cells: dict[str, Any], tmp_path: Path, tokenizer) -> None:
    write(tmp_path / "a.jsonl", cells)
    with pytest.raises(DataError) as refused:
        load_prompts([str(tmp_path / "a.jsonl")], tokenizer, PromptRules(64))
    assert f"the columns are {', '.join(cells)}" in str(refused.value) and "import" not in str(refused.value)


def test_several_files_have_the_lines_once(tmp_path: Path, tokenizer) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", *repeated(prompt="1+1?", answer="2"))
    with pytest.raises(DataError) as refused:
        load_prompts([str(tmp_path / "*.jsonl")], tokenizer, PromptRules(64))
    assert "a_prompts.parquet" in lines_of(str(refused.value))
    assert "b.jsonl: no columns 'data_source', 'reward_model'" in str(refused.value)
    assert str(refused.value).endswith("; convert it likewise")


def test_a_dry_run_takes_what_the_lines_made(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = [{"prompt": f"{n}+1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(20)]
    write(own / "theirs.jsonl", *questions)
    words = ["train", "own.yaml", "--dry-run"]
    assert cli.main([*words, "data.train=[theirs.jsonl]"]) == 2
    message = capsys.readouterr().err
    assert message.count("theirs.jsonl: no columns 'data_source', 'reward_model'; the columns are prompt, answer") == 1
    (file,) = made({own: message})
    assert cli.main([*words, "-v", f"data.train=[{file.name}]"]) == 0
    assert "0+1?" in capsys.readouterr().out
