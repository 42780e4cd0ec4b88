"""Data of the page: as few numbers and digits as a chart needs, and still the same curve."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctpo_megatron.report.charts import Axis, Chart, Curve, curves
from ctpo_megatron.report.metric_charts import MOST, kept, smoothed
from ctpo_megatron.report.page_data import bundle, chart_json, packed


def unpacked(table: dict[str, Any]) -> list[dict[str, Any]]:
    """What the script of the page makes of it."""
    rows: list[dict[str, Any]] = [{} for _ in range(table["length"])]
    for name, column in table["columns"].items():
        if isinstance(column, list):
            values = column
        elif "equal" in column:
            values = [value for value, count in column["equal"] for _ in range(count)]
        else:
            values = [first + step * n for first, step, count in column["steps"] for n in range(count)]
        assert len(values) == len(rows)
        for row, value in zip(rows, values, strict=True):
            if value is not None:
                row[name] = value
    return rows


ROWS = st.lists(
    st.fixed_dictionaries(
        {"x": st.integers(0, 40), "series": st.sampled_from(["a", "b"])}, optional={"y": st.integers(0, 9999)}
    ),
    min_size=1,
)


@given(ROWS)
def test_columns_hold_what_the_rows_did(rows: list[dict[str, Any]]) -> None:
    assert unpacked(packed({"values": rows})) == rows


def test_steps_take_three_numbers_and_values_four_digits() -> None:
    rows = [{"x": step, "y": step / 7, "series": "a"} for step in range(1, 301)]
    columns = packed({"values": rows})["columns"]
    assert columns["x"] == {"steps": [[1, 1, 300]]} and columns["series"] == {"equal": [["a", 300]]}
    assert columns["y"][:3] == [0.1429, 0.2857, 0.4286] and columns["y"][6] == 1
    assert packed({"values": [{"x": 123456}, {"x": 123459}]})["columns"]["x"] == [123456, 123459]


def test_text_of_a_run_cannot_end_the_script() -> None:
    spec = curves([Curve("</script><b>", [1], [1])], Axis("x"), Axis("y"))
    text = chart_json([Chart("c", "t", "<!--", spec)])
    assert "<" not in text and json.loads(text)["charts"]["c"]["caption"] == "<!--"


def test_thinning_keeps_every_peak() -> None:
    values = [0.0] * 10_000
    values[3333], values[7777] = 5.0, -5.0
    places = kept(values)
    assert {0, 3333, 7777, 9999} <= {*places} and len(places) <= MOST + 2 and places == sorted(places)
    assert kept(values[:MOST]) == [*range(MOST)]


def test_smoothing_is_a_mean_around_each_value() -> None:
    assert smoothed([1.0] * 99) is None
    line = [float(n) for n in range(400)]
    assert smoothed(line) == pytest.approx(line)  # the ends are not bent
    noisy = smoothed([n % 2 for n in range(1600)])
    assert noisy is not None and all(0.45 < value < 0.55 for value in noisy[50:-50])


def test_the_bundle_is_kept_and_made_again_where_it_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def make() -> bytes:
        made.append(1)
        return gzip.compress(b"window.vegaEmbed = 1;")

    monkeypatch.setattr("ctpo_megatron.report.page_data._made_bundle", make)
    assert bundle() == bundle() and len(made) == 1
    (path,) = (tmp_path / "ctpo-megatron").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert gzip.decompress(base64.b64decode(bundle())) == b"window.vegaEmbed = 1;" and len(made) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a file: no folder can be made in it
    assert bundle() and len(made) == 3
