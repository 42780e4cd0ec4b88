"""Chromium of the system with pages open in it; skipped where one is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.report import Comparison, write_comparison, write_report
from tests.report.test_comparison_page import write_runs
from tests.tracking.synthetic_run import write_run

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium, or CHROMIUM=...")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one run."""
    return write_report(write_run(tmp_path_factory.mktemp("one")))


@pytest.fixture(scope="session")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of nine runs of 300 steps."""
    folder = tmp_path_factory.mktemp("nine")
    return write_comparison(Comparison.load(write_runs(folder, steps=300)), folder / "comparison.html")


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens a page; at the end fails if it wrote to the console or asked for anything but itself."""
    contexts, said = [], []

    def open_page(path: Path, width: int = 1400, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in said if not text.startswith(("blob:", "data:"))] == []
