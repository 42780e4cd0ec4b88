"""Trajectories on the pages of `ctpo report`: by keys, finger and address, on all widths and themes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron import cli
from tests.browser.conftest import Open
from tests.browser.test_pages import WIDTHS, until
from tests.tracking.synthetic_run import write_run

pytestmark = pytest.mark.browser
OVERFLOW = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
TURN = ".episode .model .text[tabindex]"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("watched"))


@pytest.fixture(scope="module")
def address(run_dir: Path) -> str:
    """Of a page of all trajectories of the first step."""
    assert cli.main(["report", str(run_dir), "--steps", "1", "--text", "722"]) == 0
    return (run_dir / "trajectories.html").as_uri()


@pytest.fixture
def visited(browser: Any) -> Iterator[Any]:
    """Opens an address; at the end fails if a page wrote to the console, as at a script that its policy forbids."""
    contexts, said = [], []

    def open_page(url: str, width: int = 1400, scheme: str = "light", touch: bool = False) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=touch, is_mobile=touch
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def told(page: Any) -> str:
    return str(page.inner_text("#tip"))


def test_keys_go_from_token_to_token_and_tell_their_numbers(report: Path, opened: Open) -> None:
    page = opened(report)
    page.locator(TURN).first.focus()
    tokens = page.locator(TURN).first.locator("[data-t]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#tip:visible")
    assert told(page) == tokens.nth(0).get_attribute("data-t")
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelectorAll('.model [data-t]')[1].classList.contains('at')")
    assert told(page) == tokens.nth(1).get_attribute("data-t") and "cumulative log-ratio" in told(page)
    page.keyboard.press("End")
    until(page, "document.querySelector('.at + [data-t]') === null")
    assert told(page) == tokens.last.get_attribute("data-t")
    page.keyboard.press("Escape")
    assert not page.is_visible("#tip")


def test_a_finger_gets_the_numbers_of_a_token(address: str, visited: Any) -> None:
    page = visited(address, 360, touch=True)
    token = page.locator(f"{TURN} [data-t]").nth(7)
    token.tap()
    page.wait_for_selector("#tip:visible")
    assert told(page) == token.get_attribute("data-t")


def test_an_address_opens_its_trajectory_and_its_chart_is_drawn_then(report: Path, opened: Open) -> None:
    page = opened(report)
    name = page.locator("details.group:not([open]) .episode[data-source=training]").last.get_attribute("id")
    last = page.locator(f"[id='{name}']")
    assert not last.is_visible() and not last.locator("[data-drawn]").count()
    page.evaluate("name => { location.hash = name }", name)
    last.wait_for()
    assert page.evaluate("document.activeElement.id") == name
    last.locator(".ratio").scroll_into_view_if_needed()
    last.locator("[data-drawn]").wait_for()
    assert "model token" in last.locator(".ratio").inner_text()
    page.evaluate("location.hash = 'step-2-rem-0-0'")
    page.wait_for_selector("#missing:visible")
    assert "step-2-rem-0-0 is not in this file: `ctpo report` with its step" in page.inner_text("#missing")


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_and_show_step_and_source(address: str, visited: Any, width: int) -> None:
    page = visited(address, width)
    assert not page.evaluate(OVERFLOW)
    assert page.get_by_text("step 1", exact=False).first.is_visible()
    page.locator(".ratio").first.scroll_into_view_if_needed()
    page.locator("[data-drawn]").first.wait_for()
    assert not page.evaluate(OVERFLOW)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_of_trajectories(report: Path, address: str, visited: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    for url in (report.as_uri(), address):
        page = visited(url, 1400, scheme)
        found = axe.Axe().run(page, context="#trajectories").response["violations"]
        assert [(each["id"], node["target"]) for each in found for node in each["nodes"]] == []
