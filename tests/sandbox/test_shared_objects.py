"""Every kernel object that two runs can both name, with two programs side by side: on one server, and on two."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.conftest import side_by_side
from tests.sandbox.other_users import Host, server_of
from tests.sandbox.shared_objects import LEVELS, OWN, REFUSED, ROWS, SIDE_CHANNEL, Row, programs
from tests.support.deadlines import scaled

pytestmark = [
    pytest.mark.xdist_group("sandbox-users"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of calls are of x86-64"),
]
HOSTS = {"A": Host("A", "namespaces-root"), "B": Host("B", "namespaces-user"), "C": Host("C", "landlock")}
QUICK = {("A", 1), ("C", 2)}
PAIRS = [
    pytest.param((level, servers), id=f"{level} {servers}", marks=() if (level, servers) in QUICK else pytest.mark.slow)
    for level in LEVELS
    for servers in (1, 2)
]
DOCUMENT = Path(__file__).parents[2] / "docs" / "sandbox.md"
ANSWERS = {REFUSED, OWN, SIDE_CHANNEL}
ATTEMPTS = 6


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    """The level, and the addresses of the servers of the two runs."""
    level, servers = request.param
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(server_of(HOSTS[level]))[0] for _ in range(servers)]
        yield level, [urls[0], urls[-1]]


def test_the_document_has_the_same_table() -> None:
    lines = [line.split("|")[1:-1] for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    rows = [(cells[0].split("; "), tuple(cell.strip() for cell in cells[1:])) for cells in lines if len(cells) == 4]
    told = [(name.strip(), answers) for names, answers in rows for name in names if set(answers) <= ANSWERS]
    assert sorted(told) == sorted((row.name, row.answers) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_it_is_as_the_table_says(pair: tuple[str, list[str]], row: Row) -> None:
    level, urls = pair
    seconds = scaled(0.3)
    for _ in range(ATTEMPTS):
        held, looked = asyncio.run(side_by_side(*zip(urls, programs(row, seconds), strict=True)))
        assert (held.status, looked.status) == ("success", "success"), (held, looked)  # neither decides a verdict
        (began, ended, done), (first, last, noticed) = json.loads(held.stdout), json.loads(looked.stdout)
        if began <= first and last <= ended:
            break
        seconds *= 1.5  # a busy machine started one of them too late
    else:
        pytest.fail(f"the two programs were never side by side in {ATTEMPTS} attempts")
    if row.answers[LEVELS.index(level)] != SIDE_CHANNEL:
        assert (done, noticed) == ([], []), row.name
