"""The packed policy equals the same model on dense padded batches; `benchmarks.packing` runs and says what it found."""

from __future__ import annotations

import pytest

from benchmarks import packing


@pytest.fixture(scope="module")
def result() -> dict:
    return packing.run(rounds=1, threads=1, quick=True)


def test_packed_and_padded_gradients_agree(result: dict) -> None:
    assert 0 < result["agreement"] <= packing.TOLERANCE


def test_the_padded_sides_compute_more_rows(result: dict) -> None:
    packed, *padded = result["rows"]
    assert packed["useful"] == 1.0
    assert all(row["useful"] < 1 for row in padded)
    assert padded[-1]["useful"] == min(row["useful"] for row in padded)


def test_the_table_names_every_side_and_judges_the_goal(result: dict) -> None:
    page = packing.text(result)
    assert all(row["side"] in page for row in result["rows"])
    assert "than padded, 32 sequences: met" in page or "than padded, 32 sequences: MISSED" in page
