"""Numbers of data files as text: every digit, and never an exponent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctpo_megatron.data import PromptRules, number_text, read_prompts
from ctpo_megatron.rewards import score_math
from examples.prepare_data.__main__ import main


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (1e-05, "0.00001"),
            (1e22, "10000000000000000000000"),
            (72.0, "72"),
            (0.1, "0.1"),
            (-2.5e-07, "-0.00000025"),
        ),
        *((7, "7"), (10**30, "1" + 30 * "0"), (Decimal("1E+3"), "1000"), (Decimal("0.50"), "0.50"), (-0.0, "0")),
        *((0.1234588623046875, "0.1234588623046875"), (float(np.float32(0.1)), "0.10000000149011612")),
        *((1234567.125, "1234567.125"), (1 / 3, "0.3333333333333333"), (123456792.0, "123456792")),
        # The residue of a computation is no part of the number.
        *((0.1 + 0.2, "0.3"), (56.699999999999996, "56.7"), (1.1 * 1.1, "1.21"), (0.1 + 0.7, "0.8")),
        *((4.35 * 100, "435"), (1.1 * 100, "110"), (-(0.1 + 0.2), "-0.3"), (3 * 1.1e-9, "0.0000000033")),
        *((2.0**48, "281474976710656"), (2.0**53, "9007199254740992"), (9000000000000001.0, "9000000000000001")),
    ],
)
def test_a_number_is_written_in_digits(value: float | Decimal, text: str) -> None:
    assert number_text(value) == text


def _columns(values: list[float], kind: pa.DataType) -> Iterator[pa.Array]:
    """The same numbers as a plain column and as one of a dictionary."""
    array = pa.array(np.array(values, kind.to_pandas_dtype()), kind)
    yield from (array, array.dictionary_encode())


def _written(folder: Path, answers: pa.Array) -> Iterator[str]:
    """Files with these ground truths: parquet, and what `datasets` writes."""
    count = len(answers)
    messages = [[{"role": "user", "content": f"{n}?"}] for n in range(count)]
    truths = pa.StructArray.from_arrays([answers, pa.array(["rule"] * count)], ["ground_truth", "style"])
    table = pa.table({"data_source": ["u"] * count, "prompt": messages, "reward_model": truths})
    pq.write_table(table, folder / "a.parquet")
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    yield from (str(folder / "a.parquet"), str(folder / "a.arrow"))


def _prepared(collection: Path, *options: str) -> list[str]:
    """Ground truths of the prompt file that is made of a collection."""
    output = collection.with_name("prepared.parquet")
    assert main([str(collection), "--output", str(output), "--overwrite", *options]) == 0
    return [row["reward_model"]["ground_truth"] for row in pq.read_table(output).to_pylist()]


LONG = str(Decimal(2**20000))
"""Python itself reads and writes whole numbers of 4,300 digits at most."""
DOUBLES = [2.0**n for n in range(54)] + [2.0**n + 1 for n in range(53)] + [2.0**53 - 1, 281474976710657.0]
SINGLES = [0.1, 0.5, 3.14, 2.5e-05, 1234.5, 99999.5, 16777215.0, 0.123456, -7.25]


@pytest.mark.parametrize(
    ("kind", "values", "texts"),
    [
        (pa.float64(), DOUBLES, [str(int(value)) for value in DOUBLES]),
        (pa.float64(), [0.1234588623046875, 0.25], ["0.1234588623046875", "0.25"]),
        (
            pa.float32(),
            SINGLES,
            ["0.1", "0.5", "3.14", "0.000025", "1234.5", "99999.5", "16777215", "0.123456", "-7.25"],
        ),
        (pa.float16(), [3.14, 0.1, 2047.0, 60000.0], ["3.14", "0.1", "2047", "60000"]),
        (pa.decimal128(20, 2), [Decimal("9007199254740993.25")], ["9007199254740993.25"]),
    ],
)
def test_the_type_of_the_column_says_which_digits_are_the_numbers(
    tmp_path: Path, tokenizer, kind: pa.DataType, values: list[float], texts: list[str]
) -> None:
    columns = [pa.array(values, kind)] if pa.types.is_decimal(kind) else _columns(values, kind)
    for answers in columns:
        for file in _written(tmp_path, answers):
            prompts = read_prompts([file], tokenizer, PromptRules(400)).prompts
            assert [prompt.answer for prompt in prompts] == texts, (file, answers.type)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *(("281474976710656.0", "281474976710656"), ("0.1234588623046875", "0.1234588623046875"), ("0.50", "0.5")),
        *(("3.14159265358979323846", "3.14159265358979323846"), ("1E400", "1" + 400 * "0"), ("1e-05", "0.00001")),
        (LONG, LONG),
    ],
    ids=lambda text: text[:24],
)
def test_a_number_of_json_is_what_is_written(tmp_path: Path, tokenizer, number: str, text: str) -> None:
    message = '[{"role": "user", "content": "?"}]'
    line = f'{{"data_source": "u", "prompt": {message}, "reward_model": {{"ground_truth": {number}}}}}'
    (tmp_path / "a.jsonl").write_text(line)
    found = read_prompts([str(tmp_path / "a.jsonl")], tokenizer, PromptRules(400))
    assert [prompt.answer for prompt in found.prompts] == [text]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("1e999999999", "must have at most 100,000 digits"),
        ("1" * 100_001, "must have at most 100,000 digits"),
        ("1e-9999999999999999999", "must be a finite number"),
        ("NaN", "must be a finite number"),
        ("-Infinity", "must be a finite number"),
    ],
    ids=lambda text: text[:24],
)
def test_a_number_that_is_none_or_fills_the_memory_is_refused(
    tmp_path: Path, tokenizer, number: str, message: str
) -> None:
    line = f'{{"data_source": "u", "prompt": [], "reward_model": {{"ground_truth": {number}}}}}'
    (tmp_path / "a.jsonl").write_text(line)
    problems = read_prompts([str(tmp_path / "a.jsonl")], tokenizer, PromptRules(400)).problems.lines
    assert any(f"row 0 column 'reward_model': 'ground_truth' {message}" in line for line in problems)


@pytest.mark.parametrize(
    ("kind", "value", "warning"),
    [
        ("float64", sum([0.1] * 100), "has 15 digits (9.99999999999998), and float64 is sure of 15"),
        ("float64", 1 / 3, "has 16 digits (0.3333333333333333), and float64 is sure of 15"),
        ("float64", 12345678901234567890.0, "has 17 digits (12345678901234567000), and float64 is sure of 15"),
        *(("float64", value, "") for value in (2.0**53, 1e22, 0.1 + 0.2)),
        ("float32", 56.699997, "has 8 digits (56.699997), and float32 is sure of 6"),
        ("float32", 123456789.0, "has 9 digits (123456792), and float32 is sure of 6"),
        *(("float32", value, "") for value in (16777216.0, 12.345)),
        ("float16", 3.1416, "has 3 digits (3.14), and float16 is sure of 3"),
        ("float16", 2048.0, ""),
    ],
)
def test_a_number_that_may_have_been_another(tmp_path: Path, tokenizer, kind: str, value: float, warning: str) -> None:
    for file in _written(tmp_path, pa.array(np.array([1, value], kind))):
        lines = read_prompts([file], tokenizer, PromptRules(400)).warnings.lines
        assert len(lines) == bool(warning)
        assert all(f"row 1 column 'reward_model': the number {warning}" in line for line in lines)


def test_any_number_is_read_back_as_it_was() -> None:
    draw = Random(0)
    for _ in range(500):
        value = draw.uniform(-10, 10) * 10.0 ** draw.randint(-30, 30)
        text = number_text(value)
        assert float(text) == value and "e" not in text.lower()
        assert score_math(f"\\boxed{{{text}}}", text) == 1
        assert Fraction(text) == Fraction(repr(value))


@pytest.mark.parametrize(
    ("answers", "texts"),
    [
        ([1e-05, 1e22, float("nan"), 0.5], ["0.00001", "1" + 22 * "0", "0.5"]),
        ([2.0**48, None, 7.0], [str(2**48), "7"]),  # whole numbers with a gap, as pandas writes them
        (pa.array([0.1], pa.float32()), ["0.1"]),
        (pa.array([float(np.float32(0.1))]), ["0.10000000149011612"]),
    ],
)
@pytest.mark.parametrize("column", ["answer", "final"])
def test_answers_of_a_collection_are_numbers_of_their_column(
    tmp_path: Path, column: str, answers: list[float] | pa.Array, texts: list[str]
) -> None:
    problems = [f"p{number}" for number in range(len(answers))]
    pq.write_table(pa.table({"problem": problems, column: answers}), tmp_path / "raw.parquet")
    mapped = () if column == "answer" else ("--map", f"answer={column}")
    assert _prepared(tmp_path / "raw.parquet", *mapped) == texts
    report = json.loads((tmp_path / "prepared.report.json").read_text())
    assert [row["detail"] for row in report["rows"]] == ["no answer"] * (len(answers) - len(texts))


def test_a_collection_warns_of_numbers_that_may_have_been_others(tmp_path: Path, capsys) -> None:
    answers = pa.array([0.5, 56.699997, 1.1234567], pa.float32())
    pq.write_table(pa.table({"problem": ["p", "q", "r"], "answer": answers}), tmp_path / "raw.parquet")
    _prepared(tmp_path / "raw.parquet")
    told = "raw.parquet row 1 column 'answer', 1 of 2 such: the number has 8 digits (56.699997), and float32"
    assert told in capsys.readouterr().err
