"""Diagrams of docs/figures that were drawn for a phone: they say what the code says, and can be read there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest

from ctpo_megatron.config.rollout_schema import Transport
from ctpo_sandbox.records import LEVELS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {"parallel": "parallelism.md", "sandbox": "sandbox.md", "steps": "rollout.md", "weights": "rollout.md"}
"""Figure -> the page that shows it."""
PHONE = 358
"""CSS pixels of a figure on a screen of 390."""
SMALLEST = 10.5
LETTER = 0.52
"""Mean width of a letter of a sans-serif font, in sizes of the font."""
SVG = "{http://www.w3.org/2000/svg}"


def drawn(name: str) -> ElementTree.Element:
    return ElementTree.parse(DOCS / "figures" / f"{name}.svg").getroot()


def words(name: str) -> list[str]:
    """The texts of a figure."""
    return ["".join(text.itertext()) for text in drawn(name).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", PAGES)
def test_a_figure_can_be_read_on_a_phone_and_in_the_dark(name: str) -> None:
    svg, source = drawn(name), (DOCS / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    sizes = [float(size) for size in re.findall(r"font-size(?:=\"|: )(\d+)", source)]
    scale = PHONE / float(svg.attrib["width"])
    assert min(sizes) * scale > SMALLEST
    for text in svg.iter(f"{SVG}text"):
        length, x = LETTER * sizes[0] * len("".join(text.itertext())), float(text.attrib["x"])
        starts = text.attrib.get("class") in ("left", "head")
        assert x + (length if starts else length / 2) < float(svg.attrib["width"]), "".join(text.itertext())
    light, dark = source.split("@media (prefers-color-scheme: dark)")
    coloured = set(re.findall(r"^ *\.(\w+) \{.*#", light, re.MULTILINE))
    assert coloured and coloured <= set(re.findall(r"\.([a-z]+)\b", dark.partition("</style>")[0]))
    assert svg.find(f"{SVG}title") is not None and svg.find(f"{SVG}desc") is not None


@pytest.mark.parametrize(("name", "page"), PAGES.items())
def test_its_page_shows_it_and_describes_it(name: str, page: str) -> None:
    (alternative,) = re.findall(rf"!\[([^]]*)\]\(figures/{name}\.svg\)", (DOCS / page).read_text(encoding="utf-8"))
    assert len(alternative.split()) > 20


def test_the_weights_travel_by_every_transport() -> None:
    headings = [text.partition(" (auto: ")[0] for text in words("weights") if " (auto: " in text]
    assert headings == list(get_args(Transport))


def test_the_sandbox_has_every_level_from_the_outside_in() -> None:
    levels = [f"{meaning[0]} {name}" for name, meaning in LEVELS.items()]
    assert [text for text in words("sandbox") if text in levels] == levels


def test_the_ranks_have_the_order_of_megatron() -> None:
    from megatron.core.parallel_state import RankGenerator

    ranks = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=2, order="tp-cp-ep-dp-pp")
    shown = words("parallel")
    for kind in ("tp", "cp", "dp", "pp"):
        first = ", ".join(map(str, ranks.get_ranks(kind)[0]))
        assert any(text.startswith(f"{kind.upper()} ranks {first}:") for text in shown)
    pairs = [
        sorted((int(a), int(b))) for a, b in zip(*[iter(text for text in shown if text.isdigit())] * 2, strict=True)
    ]
    assert pairs == ranks.get_ranks("tp")


def test_a_step_publishes_the_version_of_the_next() -> None:
    """Step 1 publishes version 2, in both halves."""
    assert [text for text in words("steps") if re.fullmatch(r"v\d", text)] == ["v2", "v2", "v3", "v4"]
