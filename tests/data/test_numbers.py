"""Numbers of data files as text: every digit, and never an exponent."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctpo_megatron.data.prompts import _answer
from ctpo_megatron.data.refine import COLUMNS, read_problems
from ctpo_megatron.data.tables import number_text
from ctpo_megatron.rewards import score_math


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (1e-05, "0.00001"),
            (1e22, "10000000000000000000000"),
            (72.0, "72.0"),
            (0.1, "0.1"),
            (-2.5e-07, "-0.00000025"),
        ),
        *((7, "7"), (10**30, "1" + 30 * "0"), (Decimal("1E+3"), "1000"), (Decimal("0.50"), "0.50"), (-0.0, "-0.0")),
        *((float(np.float32(0.1)), "0.1"), (float(np.float32(1e-7)), "0.0000001"), (16777217.0, "16777217.0")),
        *((1234567.125, "1234567.125"), (1 / 3, "0.3333333333333333"), (123456792.0, "123456792.0")),
    ],
)
def test_a_number_is_written_in_digits(value: float | Decimal, text: str) -> None:
    assert number_text(value) == text


def test_any_number_is_read_back_as_it_was() -> None:
    draw = Random(0)
    for _ in range(500):
        value = draw.uniform(-10, 10) * 10.0 ** draw.randint(-30, 30)
        text = number_text(value)
        assert float(text) == value and "e" not in text.lower()
        assert score_math(f"\\boxed{{{text}}}", text) == 1
        assert Fraction(text) == Fraction(repr(value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("-Infinity")])
def test_a_number_that_is_not_finite_is_refused(value: float | Decimal) -> None:
    assert "must be a finite number" in (_answer({"ground_truth": value})[1] or "")


def test_a_collection_with_numbers_as_answers(tmp_path: Path) -> None:
    file = tmp_path / "raw.parquet"
    answers = [1e-05, 1e22, float("nan"), 0.5]
    pq.write_table(pa.table({"problem": [f"p{i}" for i in range(4)], "answer": answers}), file)
    problems, dropped = read_problems([str(file)], COLUMNS, "s", None)
    assert [problem.answer for problem in problems] == ["0.00001", "1" + 22 * "0", "0.5"]
    assert [each.detail for each in dropped] == ["no answer"]


def test_single_precision_keeps_its_own_digits(tmp_path: Path) -> None:
    file = tmp_path / "raw.parquet"
    pq.write_table(pa.table({"problem": ["p"], "answer": pa.array([0.1], pa.float32())}), file)
    assert read_problems([str(file)], COLUMNS, "s", None)[0][0].answer == "0.1"
