"""docs/notebooks/theory.ipynb: its stored outputs are what its cells compute, and the site shows them."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from docs.site.notebook import FOLDER, executed, markdown

PATH = FOLDER / "theory.ipynb"
STORED = json.loads(PATH.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def computed() -> dict[str, Any]:
    return executed(STORED)


def data(notebook: dict[str, Any]) -> list[dict[str, str]]:
    """The outputs of all cells: form -> content."""
    outputs = (output for cell in notebook["cells"] for output in cell.get("outputs", ()))
    return [{form: "".join(lines) for form, lines in output["data"].items()} for output in outputs]


def tables(notebook: dict[str, Any]) -> dict[str, list[list[str]]]:
    """First cells of the header -> rows of a table."""
    rows_of = {}
    for text in (output["text/markdown"] for output in data(notebook) if "text/markdown" in output):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        rows_of[" ".join(header[:3])] = rows
    return rows_of


def test_the_stored_outputs_are_what_the_cells_compute(computed: dict[str, Any]) -> None:
    """Tables, and figures by their points: letters of a picture depend on the fonts of the machine."""
    stored, new = ([output["text/plain"] for output in data(notebook)] for notebook in (STORED, computed))
    assert new == stored, "run: make reference"
    assert [list(output) for output in data(computed)] == [list(output) for output in data(STORED)]
    assert [cell["execution_count"] for cell in STORED["cells"] if cell["cell_type"] == "code"] == list(range(1, 24))


@pytest.mark.parametrize("made", ["stored", "computed"])
def test_figures_are_drawn(made: str, computed: dict[str, Any]) -> None:
    pictures = [output for output in data({"stored": STORED, "computed": computed}[made]) if "image/svg+xml" in output]
    assert len(pictures) == 5
    for picture in pictures:
        words = [text for text in ElementTree.fromstring(picture["image/svg+xml"]).itertext() if text]
        series = {line.partition(":")[0] for line in picture["text/plain"].splitlines()[1:]}
        assert "position t" in words
        assert {name for name in series if not name.endswith(", line")} <= set(words)


def test_the_tables_have_the_numbers() -> None:
    """Of the independent computation in test_theory_walk, and of the paper's propositions."""
    stored = tables(STORED)
    assert len(stored) == 14  # bias and outcome have one header, and both tables of errors
    rates = {tuple(row[:3]): row[3] for row in stored["window increments t"]}
    assert rates["widening", "no drift", "8,000"] == "0.1787" and rates["widening", "drift", "8,000"] == "0.4311"
    assert rates["fixed", "no drift", "1,000"] == "0.1899" and rates["fixed", "drift", "100"] == "0.0275"
    medians = {row[0]: row[3] for row in stored["ratio the tree above 10 %"]}
    assert medians == {"token": "0.6134", "CTPO, prefix": "0.3916", "GSPO": "0.5651", "sequence": "0"}
    biases = {row[0]: row[2] for row in stored["ratio of a turn's reward bias, own turn bias, return to go"]}
    assert [name.partition(":")[0] for name, bias in biases.items() if bias == "0"] == ["turn-end", "sequence"]
    errors = {tuple(row[:2]): row[4] for row in stored["rms d objective cut"]}
    assert (errors["0.0361", "CTPO"], errors["0.0361", "CISPO"]) == ("0.5183", "0.0036")


def test_the_page_has_every_cell_and_output() -> None:
    page = markdown(PATH.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in STORED["cells"]]
    assert [cell for cell in cells if cell not in page] == []
    assert page.count("\n```{image} data:image/svg+xml;base64,") == page.count("\n:alt: ") == 5
    assert [output["text/markdown"] for output in data(STORED) if output.get("text/markdown", "") not in page] == []


def test_a_cell_that_fails_is_not_passed_over() -> None:
    cells = [{"cell_type": "code", "source": ["x = 1\n", "x"]}, {"cell_type": "code", "source": ["x / 0"]}]
    assert data(executed({"cells": cells[:1]})) == [{"text/plain": "1"}]
    with pytest.raises(ZeroDivisionError):
        executed({"cells": cells})
