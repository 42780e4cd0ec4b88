"""What the guests found, at the end of the session."""

from __future__ import annotations

import pytest

REPORT = pytest.StashKey[list[str]]()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> list[str]:
    """Lines to be printed."""
    return request.config.stash.setdefault(REPORT, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(REPORT, []):
        terminalreporter.write_line(line)
