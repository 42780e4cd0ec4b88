"""The tests run in one process of pytest-xdist, as they share a judge, and SymPy takes seconds to import."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: costly; leave it out with -m 'not slow'")
    config.addinivalue_line("markers", "xdist_group(name): tests that run in one process")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.xdist_group("answers"))
