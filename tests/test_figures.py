"""Diagrams of docs/figures: they say what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest

from ctpo_kernels.tiles import TILE
from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.config.rollout_schema import Transport
from ctpo_megatron.rollouts.rollouts import SETTLED
from ctpo_sandbox.records import LEVELS
from tests.kernels.heads import random_head, sweep, watched

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "architecture": "concepts.md",
    "kernels": "kernels.md",
    "parallel": "parallelism.md",
    "rollout": "rollout.md",
    "sandbox": "sandbox.md",
    "steps": "rollout.md",
    "weights": "rollout.md",
}
"""Figure -> the page that shows it."""
SVG = "{http://www.w3.org/2000/svg}"


def drawn(name: str) -> ElementTree.Element:
    return ElementTree.parse(DOCS / "figures" / f"{name}.svg").getroot()


def words(name: str) -> list[str]:
    """The texts of a figure."""
    return ["".join(text.itertext()) for text in drawn(name).iter(f"{SVG}text")]


def titles(name: str) -> list[str]:
    """The titles of its boxes."""
    return ["".join(text.itertext()) for text in drawn(name).iter(f"{SVG}text") if text.attrib.get("class") == "title"]


@pytest.mark.parametrize(("name", "page"), PAGES.items())
def test_its_page_shows_it_and_describes_it(name: str, page: str) -> None:
    (alternative,) = re.findall(rf"!\[([^]]*)\]\(figures/{name}\.svg\)", (DOCS / page).read_text(encoding="utf-8"))
    assert len(alternative.split()) > 20


def test_the_weights_travel_by_every_transport() -> None:
    headings = [text.partition(" (auto: ")[0] for text in words("weights") if " (auto: " in text]
    assert headings == list(get_args(Transport))


def test_the_sandbox_has_every_level_from_the_outside_in() -> None:
    assert [text for text in words("sandbox") if text in LEVELS] == list(LEVELS)


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


PACKAGES = {
    "Checkpoints": "policy",
    "Environment": "environments",
    "Loop (train.py)": "train.py",
    "Metrics": "tracking",
    "Policy": "policy",
    "Prompts": "data",
    "Reward": "rewards",
    "Rollouts": "rollouts",
    "vLLM engine": "engines",
}
"""Box of the architecture -> the package that owns it; the sandbox is a package of its own."""


def test_the_architecture_names_what_there_is() -> None:
    assert set(titles("architecture")) == {*PACKAGES, "Sandbox server"}
    assert all((ROOT / "ctpo_megatron" / package).exists() for package in PACKAGES.values())
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(f"`{package}/`" in page or f"`{package}`" in page for package in PACKAGES.values())


def test_a_trajectory_ends_as_it_is_accounted_for() -> None:
    ends = {state.capitalize() for state in SETTLED}
    assert ends == {"Trained", "Dropped", "Quarantined"} == ends & set(titles("rollout"))
    fields, shown = RolloutConfig.model_fields, " ".join(words("rollout"))
    assert "continue" in get_args(fields["partial"].annotation) and "(continue):" in shown
    assert "refill" in get_args(fields["uniform_groups"].annotation) and "refill:" in shown
    assert "max_staleness" in fields and "with max_staleness k" in shown


def test_the_sweep_has_three_products_and_the_one_of_sequences_four() -> None:
    shown = words("kernels")
    head = random_head(1)
    products = [
        len(watched(lambda mode=mode: sweep(head, ratio_mode=mode)).products) for mode in ("cumprod", "sequence")
    ]
    assert products == [len([text for text in shown if re.fullmatch(r"product \d", text)]), 4]
    assert "phases, four products." in " ".join(shown) and f"tiles of {TILE} rows" in " ".join(shown)


def test_a_step_publishes_the_version_of_the_next() -> None:
    """Step 1 publishes version 2, in both halves."""
    assert [text for text in words("steps") if re.fullmatch(r"v\d", text)] == ["v2", "v2", "v3", "v4"]
